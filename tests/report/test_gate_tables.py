"""What a run says on a terminal: at 80 and 160 columns, worst first, whatever names are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qgate.page.tables import middle_cut, shown_width, site_text, table
from qgate.page.terminal import TerminalLine, failure_lines, plain, summary, tables
from qgate.results import Tally
from tests.report.gate_records import HOSTILE
from tests.results.making import record
from tests.results.test_texts import MIXED, WORST, stored

SNAPSHOTS = Path(__file__).parent / "gate_texts"
# How to write them anew: remove the file, run this test, and look at what it wrote.


def check_snapshot(name: str, lines: list[TerminalLine]) -> None:
    path = SNAPSHOTS / f"{name}.txt"
    text = "".join(f"{line.color[:1] or ' '} {line.text}".rstrip() + "\n" for line in lines)
    if not path.exists():
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path.name} was written: look at it, and run this again.")
    assert text == path.read_text(encoding="utf-8")


def real_like(failing: bool = True, models: tuple[str, ...] = ("tiny-mamba",)) -> Tally:
    """Three modes, failures of every kind, long metrics, grades of what is carried.

    Made here and not at random, since snapshots have every digit.
    """
    records = []
    for model in models:
        for m, mode in enumerate(("2-1", "mxfp8_e4m3", "int8")):
            for layer in range(4):
                error = 10.0 ** (m - 5) * (1 + layer)
                made = record(
                    f"backbone.layers.{layer}.mixer.in_proj:output", error, model=model, mode=mode,
                    layer=f"layers.{layer}", order=layer, node=f"{model} {mode} {layer}",
                    accepted={"relative_mse": error * (1 + 0.01 * m)},
                )  # fmt: skip
                if mode != "int8":
                    made["values"] |= {"mse": error * 0.7, "correlation": 1 - error}
                    made["grades"] = {"mse": "good", "correlation": "fair"}
                records.append(made)
    if failing:
        long, new, nan, worse = records[1], records[5], records[6], records[10]
        long["checks"][0] |= {
            "metric": "relative_mse@worst_channel",
            "value": 3.2e-4,
            "bound": 1.1e-5,
            "times": 29.1,
            "passed": False,
        }
        new["checks"][0] |= {"kind": "missing", "bound": None, "times": None, "passed": False}
        nan["checks"][0] |= {"kind": "nonfinite", "value": None, "times": None, "passed": False}
        worse["checks"][0] |= {
            "kind": "budget",
            "value": 2.5e-3,
            "bound": 1.02e-3,
            "times": 2.451,
            "passed": False,
        }
        for each in (long, new, nan, worse):
            each["passed"] = False
    return Tally(records)


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("kind", ["summary", "tables"])
def test_the_texts_of_a_run(kind: str, width: int) -> None:
    lines = {"summary": summary, "tables": tables}[kind](real_like(), width)
    assert all(shown_width(line.text) <= width for line in lines)
    check_snapshot(f"{kind}-{width}", lines)


@pytest.mark.parametrize("width", [80, 160])
def test_the_texts_of_a_green_run(width: int) -> None:
    tally = real_like(False, ("tiny-mamba", "tiny-llama"))
    assert tally.counts.failed == 0
    check_snapshot(f"green-{width}", summary(tally, width))


def test_counts_come_first_and_failures_worst_first() -> None:
    other = record("fine", 9.9e-5, mode="1")
    said = [line.text for line in summary(Tally([*map(stored, MIXED), other]), 150)]
    assert said[0] == "3 passed, 7 failed | 11 checks | improved: 1 | missing: 1"
    failed = [text for text in said if text.startswith("failed: ")]
    known = [name for name in WORST[:7] if name != "new"]
    assert [text.split()[1] for text in failed] == known
    assert failed[3] == (
        "failed: ten (carried, tiny, mode 2-1): relative_mse 0.001, limit <= 0.000102, 9.8x its "
        "limit (regression)"
    )
    (unknown,) = [text for text in said if text.startswith("no accepted errors yet")]
    assert "for 1 comparison (tiny 2-1): record them with --update-baselines" in unknown
    assert said[-1] == "1 improved: bank it with --update-baselines"


def test_what_is_left_out_is_counted() -> None:
    many = Tally(record(f"s{n}", 1.0 + n, mode=f"m{n}") for n in range(14))
    said = [line.text for line in summary(many, 150, modes=3, rows=3)]
    assert [text.split()[1] for text in said if text.startswith("failed: ")] == [
        "s13",
        "s12",
        "s11",
    ]
    assert "+11 more in results.jsonl" in said
    assert "+11 more modes" in said
    again = [line.text for line in tables(many, 150, modes=13, rows=14)]
    assert "+1 more mode" in again
    assert not any("more in results" in text for text in again)
    one = Tally(record(f"s{n}", 1.0 + n, node="one") for n in range(500))
    assert [line.text for line in summary(one, 150)][-1] == "+490 more in results.jsonl"


def test_nothing_is_not_a_success() -> None:
    assert [(line.text, line.color) for line in summary(Tally(), 80)] == [
        ("nothing was compared", "red")
    ]


def test_a_line_of_a_failure_has_metric_value_limit_and_layer_at_every_width() -> None:
    long = record(
        "backbone.layers.7.mixer.some.very.deep.module.in_proj:output",
        1e-3,
        layer="layers.7",
        model="a-model-with-a-name",
        mode="mxfp8_e4m3_with_more",
    )
    (finding,) = Tally([long]).failures
    for width in (*range(60, 260, 7), 80):
        lines = [line.text for line in failure_lines(finding, width)]
        said = " ".join(lines)
        assert all(shown_width(text) <= width for text in lines)
        for part in ("failed: ", "layers.7", "relative_mse 0.001", "limit <= 0.000102", "9.8x"):
            assert part in said, (width, lines)
    assert len(failure_lines(finding, 250)) == 1


@pytest.mark.parametrize(
    ("site", "layer", "width", "shown"),
    [
        ("a.layers.1.fc:output", "layers.1", 30, "a.layers.1.fc:output"),
        ("backbone.layers.1.fc:output", "layers.1", 24, "…layers.1.fc:output"),
        ("backbone.layers.1.mixer.in_proj:output", "layers.1", 24, "…layers.1…in_proj:output"),
        ("layers.1.mixer.in_proj.long:output", "layers.1", 20, "layers.1…long:output"),
        ("backbone.layers.1.fc:output", "layers.1", 9, "layers.1"),
        ("something.without.a.layer:output", "layers.1", 16, "somet…yer:output"),
        ("something.without.a.layer:output", "", 16, "somet…yer:output"),
    ],
)  # fmt: skip
def test_a_site_keeps_its_layer(site: str, layer: str, width: int, shown: str) -> None:
    found = site_text(site, layer, width)
    assert shown_width(found) <= width
    assert found == shown


@given(st.text(), st.text(max_size=8), st.integers(3, 60))
def test_names_fit_and_are_printable(name: str, layer: str, width: int) -> None:
    for text in (site_text(name, layer, width), middle_cut(name, width)):
        assert shown_width(text) <= width
    assert site_text(name, layer, width).isprintable()


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=60), st.integers(60, 170))
def test_nothing_of_a_name_reaches_the_terminal(name: str, width: int) -> None:
    tally = Tally([record(name, 1.0, mode=name, model=name, layer=name, scope=name), record("b")])
    for lines in (summary(tally, width), tables(tally, width)):
        for line in lines:
            assert line.text.isprintable()
            assert shown_width(line.text) <= width + 1
            assert not line.text.lstrip().startswith("::")


def test_hostile_names_are_shown_as_they_are() -> None:
    records = [
        record(name, 1.0, mode=name, model=name, scope=name)
        for name in (*HOSTILE, "::error::x", "##vso[task.complete]", "a\n::error::b")
    ]
    for width in (80, 160):
        said = [line.text for line in tables(Tally(records), width)]
        text = "\n".join(said)
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "<script>" in text
        assert not any(each.lstrip().startswith("::") for each in said)
        assert "##vso[" not in text


def test_sentences_break_between_words() -> None:
    said = [line.text for line in plain(["one two " * 20, "x" * 150], 80)]
    assert all(len(text) <= 80 for text in said)
    assert "".join(said).count("one") == 20
    assert not any(text.endswith(" o") for text in said)


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    assert table(["a", "n"], [["x\n  y", "1"], ["z", "22"]], numbers=(1,)) == [
        "a     n",
        "---  --",
        "x     1",
        "  y",
        "z    22",
    ]


def test_colors_only_where_asked() -> None:
    assert TerminalLine("x", "red").painted(True) == "\x1b[31mx\x1b[0m"
    assert TerminalLine("x", "red").painted(False) == "x"
    assert TerminalLine("x").painted(True) == "x"


def test_what_a_tally_keeps_does_not_grow_with_records() -> None:
    """A file of any size is summed up in the memory of its tests."""
    big: dict[str, Any] = record("a", 1.0, node="one", pictures=[{"x": "y" * 1000}])
    tally = Tally({**big, "site": f"s{n}"} for n in range(2000))
    assert "yyyy" not in repr(vars(tally))
    assert len(tally.failures) <= 80
