"""Grades: the bands of metrics in words, for display only; no verdict reads them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from qgate.metrics import METRICS, Metric

Grade = Literal["excellent", "good", "fair", "poor"]
_WORDS: tuple[Grade, ...] = ("excellent", "good", "fair")


def grade_of(metric: str, value: float | None) -> Grade:
    """Return the band of a value that is better than the band's end; without one it is poor."""
    entry = METRICS.get(metric)
    if value is None or not math.isfinite(value):
        return "poor"
    better = (value > band if entry.direction == "higher" else value < band for band in entry.bands)
    return next((word for word, is_in in zip(_WORDS, better, strict=True) if is_in), "poor")


def grades_of(values: Mapping[str, float | None]) -> dict[str, Grade]:
    """Return the grades of those metrics that have bands."""
    return {metric.name: grade_of(metric.name, values[metric.name]) for metric in graded(values)}


def graded(values: Iterable[str]) -> list[Metric]:
    """Return those metrics that have bands, in the order of the table."""
    return [metric for metric in METRICS if metric.bands and metric.name in values]


def graded_text(metric: str, texts: Iterator[str], value: float) -> str:
    """Return the first of `texts` that is in the band of the value, and the word of the band.

    0.99989 reads `0.99989 good`, never `0.9999 good`.
    """
    word = grade_of(metric, value)
    fitting = (text for text in texts if grade_of(metric, float(text)) == word)
    return f"{next(fitting, repr(value))} {word}"


def bands_text() -> str:
    """Return the bands of all metrics that have some in one line."""
    return "; ".join(_bands_of(metric) for metric in METRICS if metric.bands)


def _bands_of(metric: Metric) -> str:
    sign = ">" if metric.direction == "higher" else "<"
    bands = zip(_WORDS, metric.bands, strict=True)
    words = (f"{word} {sign} {_band(end)}" for word, end in bands)
    return f"{metric.short} {', '.join(words)}, else poor"


def _band(end: float) -> str:
    return f"{end:g}" if end > 0.1 else f"{end:.0e}".replace("e-0", "e-")
