"""Findings are one type: its order, its line, and the headline of a page."""

from __future__ import annotations

import math

from qgate.charts.pages import headline
from qgate.text.findings import Finding, not_drawn, worst_first

NOTE = Finding("info", "all is well")
LOSS = Finding("warn", "some is lost", 0.1)
COSTLY = Finding("warn", "much is lost", math.inf)
BROKEN = Finding("fail", "3 values\nare NaN")


def test_broken_values_come_first_then_what_costs_most() -> None:
    assert worst_first([NOTE, LOSS, COSTLY, BROKEN]) == [BROKEN, COSTLY, LOSS, NOTE]


def test_a_finding_is_one_line_under_its_mark() -> None:
    assert [finding.line() for finding in (BROKEN, LOSS, NOTE)] == [
        r"BROKEN  3 values\nare NaN",
        "LOSS    some is lost",
        "note    all is well",
    ]


def test_a_page_is_headed_by_what_is_wrong() -> None:
    assert headline([LOSS, NOTE], "a dump") == ("some is lost", "warn")
    assert headline([NOTE], "a dump") == ("Nothing is broken or lost in a dump", "good")
    assert headline([], "a dump") == ("Nothing is broken or lost in a dump", "good")
    (missing,) = not_drawn({"a.png": "no space left"})
    assert headline([missing], "a dump")[0] == "a.png could not be drawn: no space left"
