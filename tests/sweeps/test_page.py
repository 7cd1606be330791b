"""What the page of a run of sweeps says, and how much of a large run it shows."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest

from qgate.sweeps.answers import advice, answer_lines, headline
from qgate.sweeps.findings import SweptFormat, entry_of, findings
from qgate.sweeps.page import page
from qgate.sweeps.record import FormatChoice, SweepRecord
from qgate.text.findings import Finding
from tests.sweeps import sweep_records


@functools.cache
def realistic() -> SweepRecord:
    return sweep_records.realistic()[0]


def entry(number: int = 0, **more: Any) -> SweptFormat:
    base = entry_of(realistic(), f"t{number:03}", ["a.json"])
    return {**base, "tensor": f"t{number:03}.pt", **more}  # type: ignore[typeddict-item]


def test_an_entry_is_the_recommended_level() -> None:
    record = realistic()
    level = record["levels"][record["advice"]["recommended"]]
    actual = entry()
    assert actual["sqnr_db"] == level["metrics"]["sqnr_db"]
    assert actual["overflow"] == level["overflow_share"]
    assert actual["gap_db"] == record["advice"]["usual_gap_db"]


def said(*entries: SweptFormat, bad: int = 0) -> list[Finding]:
    results = [(f"t{i}", "is broken") for i in range(bad)]
    return findings(list(entries), [*results, *((swept["tensor"], None) for swept in entries)])


def test_what_costs_and_what_gains_against_the_usual_scale_are_notes() -> None:
    notes = said(entry(1, gap_db=-1.25), entry(2, gap_db=0.0), entry(3, gap_db=2.5))
    assert {level for level, *_ in notes} == {"info"}
    words = [text.partition(": ")[2] for _, text, _ in notes]
    assert words[0].startswith(
        "the recommended scale has less SQNR than production in 1 of 3 tensors, most in t001.pt"
    )
    assert words[0].endswith("has 1.25 dB less")
    assert "has more SQNR than production in 1 of 3 tensors, most in t003.pt" in words[1]


def test_saturation_at_the_recommended_level_is_a_loss() -> None:
    losses = said(entry(1, severe=True, overflow=0.2), entry(2))
    assert ("warn", True) in [
        (level, "in 1 of 2 tensors, most in t001.pt: 20.00%" in words) for level, words, _ in losses
    ]


def test_many_failures_are_counted() -> None:
    failures = [words for level, words, _ in said(bad=25) if level == "fail"]
    assert len(failures) == 21
    assert failures[-1] == "and 5 more tensors that failed"


@pytest.mark.parametrize(("gap", "shown"), [(math.inf, "+inf"), (math.nan, "–")])
def test_gaps_without_a_number_are_no_finding(gap: float, shown: str) -> None:
    assert not [level for level, *_ in said(entry(1, gap_db=gap)) if level == "warn"]
    assert shown in page([entry(1, gap_db=gap)], [("a", None)], "")


def test_of_many_tensors_the_worst_are_pictured() -> None:
    many = [entry(i, sqnr_db=float(i), rest_db=float(i)) for i in range(100)]
    text = page(many[::-1], [(item["tensor"], None) for item in many], "")
    assert len(re.findall("<svg ", text)) == 60
    assert "Of the 60 worst of 100 tensors" in text
    assert text.count("<div class='figures small'>") == 60, "a row for each tensor"
    assert text.count("<tr>") == 2 * 101, "of the sweeps, and of every metric"
    assert text.index("t000.<wbr>pt</a>") < text.index("t099.<wbr>pt</a>")


def test_values_beside_nan_give_no_advice_and_do_not_lead() -> None:
    bad = entry(1, failed="1 NaN in the tensor", gap_db=9.0, level="2^-77", severe=True)
    texts = [words for level, words, _ in said(bad, entry(2, gap_db=0.5)) if level != "fail"]
    assert texts
    assert not any("t001.pt" in words for words in texts)
    text = page([bad, entry(2)], [("t001.pt", "1 NaN in the tensor"), ("t002.pt", None)], "")
    first = text[text.index("<h1>") :].partition("</h1>")[0].replace("<wbr>", "")
    assert (
        first == "<h1><span class='fail'>1 tensor of 2 failed: t001.pt: 1 NaN in the tensor</span>"
    )
    assert "2^-77" not in text
    assert len(re.findall("<svg ", text)) == 1, "no curve would mark a scale for its other values"


def test_without_a_failure_the_page_leads_with_the_scale_to_use() -> None:
    first = entry(1, gap_db=-1.25, exponent=-9.0)
    assert headline([first], [("t001.pt", None)]) == (
        f"Use 2^-9 for {first['format']}: SQNR {first['sqnr_db']:.2f} dB, in t001.pt",
        "",
    )
    entries = [first, entry(2, sqnr_db=3.0, rest_db=3.0, exponent=5.0)]
    results = [(item["tensor"], None) for item in entries]
    assert headline(entries, results) == (
        f"Use 2^-9 to 2^5 for {first['format']}: SQNR lowest in t002.pt, 3.00 dB",
        "",
    )
    assert headline([entry(1, severe=True, overflow=0.2)], results)[1] == "warn"


def test_each_picture_has_its_name_below_it() -> None:
    text = page([entry(1, format="fp<4"), entry(1, kind="block")], [("t001.pt", None)], "")
    names = re.findall(r"</svg>\n?<figcaption>([^<]*?)</figcaption>", text)
    assert names == ["fp&lt;4, one scale", "fp8_e4m3, block offset"]


def choice(name: str, bits: float, ratio: float, reduced: float | None = None) -> FormatChoice:
    return FormatChoice(
        format=name, bits=bits, scale="blocks", sqnr_db=ratio,
        rest_db=ratio if reduced is None else reduced,
    )  # fmt: skip


def test_no_format_is_advised_that_is_best_for_few() -> None:
    best = ["int8", "fp8_e4m3"]
    entries = [
        entry(
            number,
            folder=str(number),
            choices=[choice(name, 8, 40.0), choice("mxfp4_e2m1", 4, 20.0)],
        )
        for number, name in enumerate(best)
    ]
    results = [(item["tensor"], None) for item in entries]
    assert headline(entries, results)[0] == (
        "No format is best for most of 2 tensors: of 8 bits int8 in 1 and fp8_e4m3 in 1; of 4 bits "
        "mxfp4_e2m1, in 2"
    )


def test_the_table_says_that_massive_elements_are_left_out() -> None:
    choices = [choice("int8", 8, 40.0, 5.0), choice("mxfp4_e2m1", 4, 20.0)]
    lines = answer_lines([entry(choices=choices)], [("t000.pt", None)], 80, "")
    assert lines[1].endswith(" SQNR without massive elements")
    assert "mxfp4_e2m1" in lines[2]


def test_blocks_lead_where_one_scale_loses_much() -> None:
    one = entry(format="fp4_e2m1", sqnr_db=8.0, rest_db=8.0, gap_db=0.0, exponent=3.0, flush=0.9)
    blocks = {**one, "format": "mxfp4_e2m1", "kind": "block", "sqnr_db": 15.0, "rest_db": 15.0}
    words = advice([one, {**blocks, "exponent": 0.0}])  # type: ignore[list-item]
    assert words[0] == "use mxfp4_e2m1 with its blocks' scales: SQNR 15.00 dB"
    assert words[1].startswith("with one scale 2^3 is best for fp4_e2m1: 8.00 dB, ")
    assert "90.00% become zero" in words[1]


def test_nothing_swept_is_a_page_too() -> None:
    text = page([], [("x.pt", "there is no file")], "21 levels")
    assert "No tensor could be swept." in text
    assert "<section id='sweeps'>" not in text
    assert "x.pt: there is no file" in text
