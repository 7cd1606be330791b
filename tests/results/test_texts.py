"""What is shown of records: CSV, terminal, JUnit, Markdown, annotations."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgate.results import (
    Tally,
    Writer,
    binding,
    junit_properties,
    markdown_summary,
    read,
    to_csv,
    worst_first,
)
from qgate.results.checks import view_of
from qgate.results.ci import github_annotation
from qgate.results.files import COLUMNS, line, parse
from qgate.results.summary import GateCounts, summarize_comparison, verdict_texts
from tests.results.making import header, record

ODD = "a|b`c\n<x>%:,\x1b[31m"


def stored(given: dict[str, Any]) -> dict[str, Any]:
    """A record as a reader gets it."""
    parsed: dict[str, Any] = parse(line(given).encode())
    return parsed


MIXED = [
    record("good", 1.01e-4),
    record("better", 5e-5),
    record("twice", 2e-4),
    record("ten", 1e-3),
    record("new", accepted={}),
    record("nan", math.nan),
    record("above-zero", accepted={"relative_mse": -1.0}),
    record("count", nonfinite=2),
    record("none", gated=(), accepted={}),
]
WORST = ["count", "nan", "none", "above-zero", "ten", "twice", "new", "good", "better"]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_worst_first_also_of_what_was_stored() -> None:
    assert [entry["site"] for entry in worst_first(MIXED)] == WORST
    assert [stored_entry["site"] for stored_entry in worst_first(map(stored, MIXED))] == WORST
    assert [reversed_entry["site"] for reversed_entry in worst_first(MIXED[::-1])] == WORST


def test_the_binding_check_of_a_record() -> None:
    failing = record(mse=1e-3, nonfinite=1)
    assert (binding(failing) or {})["kind"] == "nonfinite"
    assert binding(record(checks=[], passed=False)) is None


def test_csv_has_a_row_per_site_and_metric(tmp_path: Path) -> None:
    full_record = record(
        "fc1", 1.0 / 3, values={"relative_mse": 1.0 / 3, "mae": 0.5}, ideal={"relative_mse": 1e-5}
    )
    assert to_csv([full_record, record(ODD, math.nan)], tmp_path / "r.csv") == 3
    csv_rows = rows(tmp_path / "r.csv")
    assert tuple(csv_rows[0]) == COLUMNS
    assert [(row["site"], row["metric"], row["value"], row["kind"]) for row in csv_rows] == [
        ("fc1", "relative_mse", "0.333333333", "regression"),
        ("fc1", "mae", "0.5", ""),
        ("a|b`c\\n<x>%:,\\x1b[31m", "relative_mse", "nan", "nonfinite"),
    ]
    assert (csv_rows[0]["ideal"], csv_rows[0]["accepted"], csv_rows[0]["metric_passed"]) == (
        "1e-05",
        "0.0001",
        "false",
    )
    assert float(csv_rows[0]["bound"]) == pytest.approx(1.02e-4)


def test_csv_has_node_and_seconds_once_for_a_test(tmp_path: Path) -> None:
    """The seconds of the column add up to those of the run, however many metrics a test has."""
    two = {"values": {"relative_mse": 0.5, "mae": 0.5}, "node": "t[a]", "seconds": 1.23456}
    batch = [record("a", **two), record("b", **two), record("a", **two, attempt=1)]
    to_csv([*batch, record("c", node="t[c]", seconds=2.0)], tmp_path / "r.csv")
    timings = [(row["node"], row["seconds"]) for row in rows(tmp_path / "r.csv")]
    retried, first, later = ("t[a]", "1.23"), ("t[a]", "1.23"), ("", "")
    assert timings == [first, later, later, later, retried, later, ("t[c]", "2.0")]


def test_csv_of_a_file_names_what_json_could_not_hold(tmp_path: Path) -> None:
    with Writer(tmp_path / "r.jsonl", header()) as writer:
        writer.append(record(mse=math.inf))
        writer.append(record(nonfinite=4))
    to_csv(read(tmp_path / "r.jsonl")[1], tmp_path / "r.csv")
    csv_rows = rows(tmp_path / "r.csv")
    assert [(row["metric"], row["value"]) for row in csv_rows] == [
        ("relative_mse", "inf"),
        ("relative_mse", "0.0001"),
        ("nonfinite", "4.0"),
    ]


def test_a_csv_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    to_csv([record()], tmp_path / "r.csv")
    before = (tmp_path / "r.csv").read_bytes()
    with pytest.raises(KeyError):
        to_csv([record("b"), {}], tmp_path / "r.csv")
    assert (tmp_path / "r.csv").read_bytes() == before


def test_nothing_is_not_a_success() -> None:
    summary = markdown_summary([])
    assert "nothing was compared" in summary
    assert "passed" not in summary
    assert "the run failed" in markdown_summary([], broken=["it broke"]).splitlines()[0]


def test_only_the_last_attempt_is_summed_up() -> None:
    attempts = [record("a", 1.0), record("a", attempt=1)]
    for given_ in (attempts, attempts[::-1]):
        counts = Tally(given_).counts
        assert (counts.passed, counts.failed) == (1, 0)
        assert "| a |" not in markdown_summary(given_)


def test_a_tally_counts_what_it_lets_by() -> None:
    tally = Tally()
    records = [stored(entry) for entry in MIXED]
    assert list(tally.pass_through(records)) == records
    assert tally.counts == Tally(MIXED).counts
    assert tally.counts == GateCounts(passed=2, failed=7, checks=10, improved=1, missing=1)
    assert (tally.gates, tally.failed_gates) == (9, 7)
    assert [failure.site for failure in tally.failures] == WORST[:7]
    assert tally.unknown == {("tiny", "2-1"): 1}
    (mode,) = tally.modes
    assert mode.worst is not None
    assert (mode.gates, mode.failed, mode.worst.site) == (9, 7, "count")


def test_a_tally_that_was_asked_goes_on_counting() -> None:
    tally = Tally(record("a", 1.0) for _ in range(2))
    assert (tally.counts.failed, tally.failed_gates, len(tally.modes)) == (2, 1, 1)
    tally.add(record("b", 1.0, mode="other", node="n2"))
    assert (tally.counts.failed, tally.failed_gates, len(tally.modes)) == (3, 2, 2)
    tally.add(record("a", attempt=1))
    assert (tally.counts.failed, tally.failed_gates) == (1, 1)


def test_a_tally_keeps_the_worst_of_very_many_failures_of_one_test() -> None:
    tally = Tally(record(f"s{n}", 1.0 + n, node="one") for n in range(500))
    assert tally.counts.failed == 500
    assert 40 <= len(tally.failures) <= 80
    assert [failure.site for failure in tally.failures[:3]] == ["s499", "s498", "s497"]


def test_junit_properties_name_site_scope_and_metric() -> None:
    assert junit_properties(record("fc1", 1e-3)) == [
        ("qgate model", "tiny"),
        ("qgate mode", "2-1"),
        ("qgate layer", "0"),
        (
            "qgate fc1 carried relative_mse",
            "failed: relative_mse 1.00e-03, limit <= 1.02e-04, 9.8x its limit (regression)",
        ),
    ]
    assert junit_properties(record(mse=5e-5))[-1][1].startswith("improved: ")
    assert junit_properties(record())[-1][1].startswith("passed: ")


@given(st.text())
def test_junit_properties_are_printable_lines(name: str) -> None:
    for pair in junit_properties(record(name, mode=name)):
        assert all(text.isprintable() for text in pair)


def failures(said: str) -> list[str]:
    lines = said.splitlines()
    start = lines.index("Failures, worst first:")
    return [line for line in lines[start + 4 :] if line.startswith("|")]


def test_the_markdown_lists_modes_and_failures_worst_first() -> None:
    summary = markdown_summary(map(stored, MIXED), rows=6, about="tiny on cpu")
    lines = summary.splitlines()
    assert lines[:5] == [
        "## qgate: 6 of 9 gates failed, 1 new, 1 fault in 2-1, tiny on cpu",
        "",
        "**cause: count (tiny, mode 2-1) is out of its limit: nonfinite 2, limit &#60;= 0, not "
        "finite; follow from it: 5 layers**",
        "",
        "2 passed, 7 failed | 10 checks | improved: 1 | missing: 1",
    ]
    assert lines[8].startswith("| tiny 2-1 | 9 | 7 | count (carried) | nonfinite | 2 |")
    assert [row.split(" | ")[0].strip("| ") for row in failures(summary)] == WORST[:6]
    assert (
        "| ten | carried | tiny 2-1 | relative&#95;mse | 1.00e-03 | &#60;= 1.02e-04 | 9.8x "
        "(regression) | 10x |"
    ) in lines
    assert "<details><summary>All failures</summary>" in lines
    assert lines[-3:] == ["+1 more in `results.jsonl`", "", "</details>"]


@given(st.text())
def test_markdown_cells_stay_cells(name: str) -> None:
    summary = markdown_summary([record(name, 1.0, mode=name, model=name)], about=name)
    (row,) = failures(summary)
    assert row.count("|") == 9
    assert not set("<*") & set(re.sub(r"`[^`]*`", "", row))
    assert row.count("`") % 2 == 0
    assert len(summary.splitlines()) == 19


@pytest.mark.parametrize(
    "name",
    ["@octocat", "https://evil", "(www.evil.com)", "a@b.com", "GH-12", "o/r#1", "$x^2$", ":smile:"],
)
def test_what_github_brings_to_life_is_code(name: str) -> None:
    summary = markdown_summary(
        [record(name, 1.0, mode=name, model=name)], about=f"x_y {name}", broken=[name]
    )
    assert name not in re.sub(r"`[^`]*`", "", summary)
    (row,) = failures(summary)
    assert row.startswith(f"| `{name}` | carried | `{name}` `{name}` | ")
    assert summary.splitlines()[0].endswith(f", x&#95;y `{name}`")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("@a|b`c<d>|", "`@a`&#124;`b`&#96;`c`&#60;`d`&#62;&#124;"),
        ("fc1:output 2026-11-21T10:48:06+00:00", "fc1:output 2026-11-21T10:48:06+00:00"),
        ("#1 a_b @c_d", "`#1` a&#95;b `@c_d`"),
    ],
)
def test_code_in_a_cell_ends_where_it_should(name: str, shown: str) -> None:
    (row,) = failures(markdown_summary([record(name, 1.0)]))
    assert row.startswith(f"| {shown} | carried |")


def test_markdown_stays_below_what_github_takes() -> None:
    name = 4000 * "<🦙"
    many = [record(f"{n}{name}", 1.0 + n, mode=f"{n}{name}") for n in range(60)]
    summary = markdown_summary(many, rows=60, broken=60 * [name])
    assert len(summary.encode()) < 46_000
    assert "more in `results.jsonl`" in summary
    assert "of 60 gates failed" in summary


def test_annotations_are_for_failures() -> None:
    assert github_annotation(record()) is None
    assert github_annotation(record("fc1", 1e-3)) == (
        "::error title=qgate tiny 2-1::relative_mse 1.00e-03, limit <= 1.02e-04, "
        "9.8x its limit (regression) at fc1 (carried, mode 2-1)"
    )
    assert github_annotation(record(checks=[], passed=False, site="fc1")) == (
        "::error title=qgate tiny 2-1::nothing compared at fc1 (carried, mode 2-1)"
    )


def test_annotations_escape_what_github_reads() -> None:
    annotation = github_annotation(
        record("a%b\r\n::warning::x,y", 1.0, mode="m:1,2%\n", file="s:1,2.py", line=7)
    )
    assert annotation is not None
    assert annotation.startswith(
        "::error file=s%3A1%2C2.py,line=7,title=qgate tiny m%3A1%2C2%25\\n::"
    )
    assert "a%25b\\r\\n::warning::x,y" in annotation
    assert "m:1,2%25\\n)" in annotation


@given(st.text())
def test_an_annotation_is_one_line_whatever_the_names(name: str) -> None:
    annotation = github_annotation(record(name, 1.0, mode=name, model=name)) or ""
    assert annotation.startswith("::error title=")
    assert not set("\r\n") & set(annotation)
    properties = annotation.removeprefix("::error title=").split("::", 1)[0]
    assert not set(":,") & set(properties)


def test_the_summary_grades_what_a_mode_carries() -> None:
    rows = [
        record("a", values={"mse": 3e-4, "correlation": 0.99987}, grades={"mse": "good", "correlation": "good"}),
        record("b", values={"mse": 2e-2, "correlation": 0.9999912}, grades={"mse": "poor", "correlation": "excellent"}),
        record("c", values={"mse": 9.0, "correlation": 0.1}, grades={"mse": "poor", "correlation": "poor"}, scope="local"),
    ]  # fmt: skip
    (mode,) = Tally(rows).modes
    assert [grade.text() for grade in mode.carried] == [
        "MSE 0.02 poor",
        "correlation 0.99987 good",
    ]
    assert "MSE 0.02 poor, correlation 0.99987 good" in markdown_summary(rows)
    assert Tally([record("a")]).modes[0].carried == ()


def test_changes_are_told_as_people_say_them() -> None:
    def change(value: float, accepted: float, **more: Any) -> str:
        changed = record("a", value, accepted={"relative_mse": accepted}, **more)
        return summarize_comparison(changed).view.change

    assert change(1.26e-4, 1e-4) == "+26 %"
    assert change(9.9e-5, 1e-4) == "-1 %"
    assert change(2.7e-3, 1e-4) == "27x"
    assert change(1e-5, 1e-4) == "0.1x"
    assert change(1e-4, 1e-4) == "same"
    assert change(1e-4, 0.0) == "from 0"
    assert change(math.nan, 1e-4) == "-"


def test_a_formula_stays_text_in_the_table(tmp_path: Path) -> None:
    names = ["=cmd()", "+1", "-1", "@x", "\t=x", "＝x", "a\n=b", "right\u202eto left"]
    to_csv([record(name) for name in names], tmp_path / "r.csv")
    sites = [row["site"] for row in rows(tmp_path / "r.csv")]
    assert sites == [
        "'=cmd()",
        "'+1",
        "'-1",
        "'@x",
        "'\\t=x",
        "'＝x",
        "a\\n=b",
        "right\\u202eto left",
    ]


def test_value_and_limit_differ_in_every_text() -> None:
    near = record("near", 1.0200001e-4)
    view = view_of(near["checks"][0])
    assert view.now != view.most
    assert view.now in markdown_summary([near])
    assert f"{view.metric} {view.now}, limit {view.limit}" in str(github_annotation(near))


def test_one_view_has_the_texts_of_a_check() -> None:
    check = {
        "metric": "log2_mean", "kind": "regression", "value": -3.5, "side": "<=", "bound": -4.0,
        "against": -4.5, "times": 2.0, "passed": False, "improved": False,
    }  # fmt: skip
    view = view_of(check)
    assert view.text() == "log2_mean -3.5, limit <= -4, 2x its limit (regression)"
    assert (view.against, view.change, view.how_far) == ("-4.5", "2x", "2x (regression)")
    lost = view_of({**check, "value": None, "times": None})
    assert lost.text() == "log2_mean not finite, limit <= -4"
    assert (lost.far, lost.distance, lost.change, lost.times) == ("-", "not finite", "-", math.inf)
    unexplained = view_of({**check, "kind": "budget", "bound": None, "times": math.inf})
    assert unexplained.text() == "log2_mean -3.5, budget"
    named = view_of({**check, "text": "int8", "accepted_text": "int4", "side": "=="})
    assert (named.now, named.limit, named.against) == ("int8", "== int4", "int4")
    assert view_of(None).text() == "nothing compared"
    ideal = {"kind": "budget", "value": 2e-4, "bound": 1.1e-4, "against": 1e-4, "allowed": 0.5}
    assert view_of({**check, "metric": "relative_mse", **ideal}).change == "3.1 dB"


def test_an_expected_failure_counts_neither_way() -> None:
    expected = {**record("known", 1.0), "xfailed": "bug 17"}
    assert Tally([expected]).counts == Tally([]).counts
    assert Tally([expected]).causes == []
    assert github_annotation(expected) is None
    assert Tally([expected, record("fine")]).counts.text().startswith("1 passed, 0 failed")


def test_counts_of_a_failing_run_name_their_units() -> None:
    tally = Tally([record("bad", 1.0), record("fine", node="other")])
    assert verdict_texts(tally, {}) == ("1 of 2 gates failed, 1 fault in 2-1", [])
    assert tally.counts.text().startswith("1 passed, 1 failed | 2 checks")
