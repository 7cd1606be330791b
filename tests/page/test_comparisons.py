"""Two runs side by side: what broke, what is fixed, worse, better, new or gone, and what else differs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable
from typing import Any

import pytest

from qgate.page.comparison_texts import (
    comparison_lines,
    comparison_markdown,
    counts_text,
    diagnosis,
    headline,
    verdict_text,
)
from qgate.page.comparisons import ComparedRun, RunComparison, compare
from qgate.page.data import comparison_csv
from qgate.page.terminal import display_width
from tests.results.making import header, record
from tests.results.test_texts import stored

Records = Iterable[dict[str, Any]]


def side(name: str, *records: dict[str, Any], **header_fields: Any) -> ComparedRun:
    return ComparedRun(name, header(**header_fields), map(stored, records))


def compared(first: Records, later: Records, **header_fields: Any) -> RunComparison:
    return compare(side("before", *first, **header_fields), side("after", *later, **header_fields))


def groups(comparison: RunComparison) -> dict[str, list[str]]:
    return {group: [row.site for row in comparison.of(group)] for group in ("broke", "fixed", "worse", "better", "new", "gone", "equal")}  # fmt: skip


def test_every_row_is_in_one_group() -> None:
    before = [
        record("a"),
        record("b", 1.0),
        record("c", 1e-4),
        record("d", 1.01e-4),
        record("e"),
        record("g"),
        record("h", 1.0),
        record("i", 1.0),
    ]
    after = [record("a", 1.0), record("b"), record("c", 1.0201e-4, accepted={"relative_mse": 1.01e-4}), record("d", 5e-5), record("f"), record("g", 1.001e-4), record("h", 1.0), record("i", 2.0)]  # fmt: skip
    comparison = compared(before, after)
    assert groups(comparison) == {
        "broke": ["a"], "fixed": ["b"], "worse": ["i", "c"], "better": ["d"], "new": ["f"],
        "gone": ["e"], "equal": ["h", "g"],
    }  # fmt: skip
    assert comparison.counts == {
        "broke": 1,
        "fixed": 1,
        "worse": 2,
        "better": 1,
        "new": 1,
        "gone": 1,
        "equal": 2,
    }
    assert comparison.still_failing == 1
    assert not comparison.is_clean
    assert counts_text(comparison) == (
        "1 broke, 1 fixed, 2 worse, 1 better, 1 new, 1 gone, 2 equal (within 2 %; 1 of them fails)"
    )
    (broke,) = comparison.of("broke")
    assert (broke.metric, broke.ratio) == ("relative_mse", pytest.approx(1e4))
    assert [cell and cell.passed for cell in broke.cells] == [True, False]
    assert verdict_text(broke, comparison.names) == "failed in after"


def test_runs_alike_are_equal_and_clean() -> None:
    records = [record("a"), record("b", 1.0), record("n", math.nan)]
    comparison = compared(records, records)
    assert comparison.is_clean
    assert {row.group for row in comparison.rows} == {"equal"}
    assert comparison.differences == ()
    assert comparison.still_failing == 2


def test_a_value_that_is_not_finite_is_worse_than_any_other() -> None:
    comparison = compared(
        [record("a", 1.0), record("b", math.nan)], [record("a", math.nan), record("b", 1.0)]
    )
    assert groups(comparison)["worse"] == ["a"]
    assert groups(comparison)["better"] == ["b"]


def test_what_float32_leaves_is_no_change() -> None:
    goal = {"relative_mse": 1e-8}
    comparison = compared([record("a", 1e-14, accepted=goal)], [record("a", 9e-14, accepted=goal)])
    assert groups(comparison)["equal"] == ["a"]


def two(site: str, mse: float, worst: float) -> dict[str, Any]:
    """A comparison with two metrics, of which the second is nearer to its limit."""
    result = record(site, mse)
    other = {
        **result["checks"][0],
        "metric": "relative_mse@worst_channel",
        "value": worst,
        "times": worst / 1e-2,
        "passed": worst <= 1e-2,
    }
    result["checks"].append(other)
    result["passed"] = all(check["passed"] for check in result["checks"])
    return result


def test_the_metric_is_what_decided_or_what_moved_most() -> None:
    moved = compared([two("a", 1e-4, 9.9e-3)], [two("a", 5e-5, 9.8e-3)])
    assert [(row.metric, row.group) for row in moved.rows] == [("relative_mse", "better")]
    decided = compared([two("a", 1e-4, 9e-3)], [two("a", 5e-5, 2e-2)])
    assert [(row.metric, row.group) for row in decided.rows] == [
        ("relative_mse@worst_channel", "broke")
    ]


@pytest.mark.parametrize(
    ("metric", "side_", "a", "b", "group", "ratio"),
    [
        ("next_token_accuracy", ">=", 0.5, 0.4, "worse", 0.8),
        ("next_token_accuracy", ">=", 0.4, 0.5, "better", 1.25),
        ("log2_amax", "<=", 3.0, 4.0, "worse", 2.0),
        ("sqnr_db", ">=", 40.0, 37.0, "worse", 10**-0.3),
        ("exponent", "==", 3.0, 4.0, "equal", None),
        ("flushed_share", "<=", 0.0, 0.1, "worse", None),
    ],
)
def test_which_way_is_better(
    metric: str, side_: str, a: float, b: float, group: str, ratio: float | None
) -> None:
    def result_of(value: float) -> dict[str, Any]:
        one = record("a")
        check = {**one["checks"][0], "metric": metric, "side": side_, "value": value, "times": 0.5}
        return {**one, "values": {metric: value}, "checks": [check]}

    metrics = [
        {"name": "next_token_accuracy", "direction": "higher"},
        {"name": "sqnr_db", "direction": "higher"},
    ]
    (row,) = compare(
        side("x", result_of(a), metrics=metrics), side("y", result_of(b), metrics=metrics)
    ).rows
    assert row.group == group
    assert row.ratio == (None if ratio is None else pytest.approx(ratio))


def test_modes_are_compared_where_each_run_has_one_of_its_own() -> None:
    runs = [
        [record("a", mse, mode=mode), record("c", suite="canary", mode="canary")]
        for mode, mse in (("fp8", 1e-4), ("int8", 1.0))
    ]
    comparison = compared(*runs)
    assert groups(comparison)["broke"] == ["a"]
    assert groups(comparison)["equal"] == ["c"]
    (row,) = comparison.of("broke")
    assert row.mode == ""
    assert [cell.mode for cell in row.cells if cell] == ["fp8", "int8"]
    assert verdict_text(row, comparison.names) == "failed in after"
    assert headline(comparison) == "after (mode int8) compared with before (mode fp8)"
    same = compared([record("a", mode="m")], [record("a", mode="m"), record("a", mode="n")])
    assert all(row.mode for row in same.rows)
    assert groups(same)["new"] == ["a"]


def test_only_the_last_attempt_counts_in_whatever_order() -> None:
    retried = [
        record("a", 1.0),
        record("gone", 1.0, node=record("a")["node"]),
        record("a", attempt=1),
    ]
    for records in (retried, retried[::-1]):
        comparison = compared([record("a")], records)
        assert groups(comparison)["equal"] == ["a"]
        assert groups(comparison)["new"] == []


def test_of_two_tests_with_one_comparison_the_worse_counts() -> None:
    for records in (
        [record("a", 1.0, node="x"), record("a", node="y")],
        [record("a", node="y"), record("a", 1.0, node="x")],
    ):
        assert groups(compared([record("a")], records))["broke"] == ["a"]


def test_what_differs_is_told_warnings_first() -> None:
    one = side(
        "cpu", record("a"), limits=[{"model": "tiny", "source": "default", "budget_db": 0.5}]
    )
    two_ = side(
        "gpu", record("a"), device="cuda", commit="def", torch="2.13",
        models={"tiny": {"weights": "ff", "inputs": "1b"}}, plans={"2-1": {"fc1:weight": "int4"}},
        limits=[{"model": "tiny", "source": "default", "budget_db": 1.0}], complete=False,
    )  # fmt: skip
    comparison = compare(one, two_)
    texts = [difference.text(comparison.names) for difference in comparison.differences]
    assert texts == [
        "tiny: other weights: cpu 0a, gpu ff",
        "limits: budget_db, default of tiny: cpu 0.5, gpu 1.0",
        "plan of 2-1: 1 sites are quantized otherwise, such as fc1:weight: cpu int8, gpu int4",
        "complete: gpu ran a part of the tests, or was broken off",
        "commit: cpu abc, gpu def",
        "device: cpu cpu, gpu cuda",
        "torch: cpu 2.9.0, gpu 2.13",
    ]
    assert [difference.warning for difference in comparison.differences] == [True] * 4 + [False] * 3


def test_runs_with_nothing_in_common_say_so_first() -> None:
    comparison = compare(
        side("a", record("x", model="m1"), models={"m1": {}}),
        side("b", record("x", model="m2"), models={"m2": {}}),
    )
    assert comparison.differences[0].what == "nothing in common"
    assert "different models are compared" in comparison.differences[1].text(comparison.names)
    assert any(line.color == "yellow" for line in comparison_lines(comparison, 80))


@pytest.mark.parametrize(
    ("later", "words", "tone"),
    [
        ({"a": 1.0, "b": 1e-4}, "a (mode) passed in before and fails in after", "fail"),
        (
            {"a": 1.0, "b": 2.0},
            "2 places that passed in before fail in after, first b (mode)",
            "fail",
        ),
        ({"a": 1.5e-4, "b": 1e-4}, "1 place got worse, most a (mode, relative_mse +50 %)", "warn"),
        ({"a": 1e-4}, "Nothing got worse; 1 place is gone, 0 new", ""),
        ({"c": 1e-4}, "Nothing can be compared; 2 places are gone, 1 new", ""),
        ({"a": 5e-5, "b": 1e-4}, "Nothing got worse, 1 place got better", "good"),
    ],
)
def test_the_page_leads_with_what_changed(later: dict[str, float], words: str, tone: str) -> None:
    first = [record(site, mode="mode") for site in ("a", "b")]
    second = [
        record(site, mse, mode="mode", accepted={"relative_mse": min(mse, 1e-3)})
        for site, mse in later.items()
    ]
    assert diagnosis(compared(first, second)) == (words, tone)


ODD = "a|b\n<script>\x1b[31m=cmd()"


@pytest.mark.parametrize("width", [80, 160])
def test_the_lines_fit(width: int) -> None:
    before = [record(f"backbone.layers.{n}.mixer.in_proj:output", 1e-4) for n in range(30)]
    values = [10.0**-n if n < 5 else 0.6e-4 for n in range(29)]
    after = [record(f"backbone.layers.{n}.mixer.in_proj:output", v) for n, v in enumerate(values)]
    after += [record(ODD, mode=ODD, model=ODD)]
    lines = comparison_lines(compared(before, after), width, rows=3)
    assert all(display_width(line.text) <= width and line.text.isprintable() for line in lines)
    texts = [line.text for line in lines]
    assert "Broke: passed before, fails now" in texts
    assert "+21 more" in texts
    assert texts.index("Broke: passed before, fails now") < texts.index("Better")
    assert [line.color for line in lines if "broke," in line.text] == ["red"]


def test_markdown_is_escaped_and_bounded() -> None:
    before = [record(f"{n}{ODD}{500 * '<'}", mode=ODD) for n in range(80)]
    after = [record(f"{n}{ODD}{500 * '<'}", 1.0, mode=ODD) for n in range(80)]
    markdown = comparison_markdown(compared(before, after), rows=80)
    assert len(markdown.encode()) < 20_000
    assert "<script>" not in markdown
    assert "\x1b" not in markdown
    assert "more" in markdown.splitlines()[-1]


def test_the_table_has_every_row_and_no_formula() -> None:
    comparison = compare(
        side("=x", record("=a"), record("b")), side("y", record("=a", math.nan), record("b"))
    )
    text = comparison_csv(comparison)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["group"], row["site"], row["y passed"]) for row in rows] == [
        ("broke", "'=a", "false"),
        ("equal", "b", "true"),
    ]
    assert not any(cell.startswith("=") for line in csv.reader(io.StringIO(text)) for cell in line)
    assert json.loads(rows[1]["y ratio"]) == 1.0
