"""Grades: the known bands in words, for display only; no verdict reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from qgate.metrics import METRICS

Grade = Literal["excellent", "good", "fair", "poor"]
_WORDS: tuple[Grade, ...] = ("excellent", "good", "fair")


def grade_of(metric: str, value: float | None) -> Grade:
    """Return the band of a value that is better than the band's end; without one it is poor."""
    known = METRICS.get(metric)
    if value is None or not math.isfinite(value):
        return "poor"
    better = (value > band if known.direction == "higher" else value < band for band in known.bands)
    return next((word for word, is_in in zip(_WORDS, better, strict=True) if is_in), "poor")


def grades_of(values: Mapping[str, float | None]) -> dict[str, Grade]:
    """Return the grades of those metrics that have bands."""
    return {
        each.name: grade_of(each.name, values[each.name])
        for each in METRICS
        if each.bands and each.name in values
    }
