"""Grades: the known bands in words, for display only; no verdict reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

Grade = Literal["excellent", "good", "fair", "poor"]
_WORDS: tuple[Grade, ...] = ("excellent", "good", "fair")
MSE_BANDS = (1e-4, 1e-3, 1e-2)
CORRELATION_BANDS = (0.9999, 0.999, 0.99)


def grade_mse(value: float | None) -> Grade:
    """`excellent` below 1e-4, `good` below 1e-3, `fair` below 1e-2."""
    if value is None or not math.isfinite(value):
        return "poor"
    return next(
        (word for word, band in zip(_WORDS, MSE_BANDS, strict=True) if value < band), "poor"
    )


def grade_correlation(value: float | None) -> Grade:
    """`excellent` above 0.9999, `good` above 0.999, `fair` above 0.99."""
    if value is None or not math.isfinite(value):
        return "poor"
    bands = zip(_WORDS, CORRELATION_BANDS, strict=True)
    return next((word for word, band in bands if value > band), "poor")


def grades_of(values: Mapping[str, float | None]) -> dict[str, Grade]:
    """The grades of those of the two metrics that there are."""
    known = {"mse": grade_mse, "correlation": grade_correlation}
    return {name: grade(values[name]) for name, grade in known.items() if name in values}


def graded_text(shown: Iterator[str], value: float, grade: Callable[[float | None], Grade]) -> str:
    """Return the first of `shown` that is in the band of the value, and the word of the band.

    0.99989 reads `0.99989 good`, never `0.9999 good`.
    """
    word = grade(value)
    return f"{next((text for text in shown if grade(float(text)) == word), repr(value))} {word}"


def bands_text() -> str:
    """Return the bands of both metrics in one line."""
    mse = (f"{w} < {b:.0e}".replace("e-0", "e-") for w, b in zip(_WORDS, MSE_BANDS, strict=True))
    correlation = (f"{w} > {b:g}" for w, b in zip(_WORDS, CORRELATION_BANDS, strict=True))
    return f"MSE {', '.join(mse)}, else poor; correlation {', '.join(correlation)}, else poor"
