"""The metrics: numbers read from the error sums of one comparison.

What they are where a formula has nothing to divide by:

| case | result |
|---|---|
| no error at all | absolute and relative errors 0, sqnr_db and psnr_db inf, cosine and correlation 1 |
| zero reference, some error | relative errors inf, sqnr_db and psnr_db -inf, cosine 0 |
| constant reference, some error | correlation 0 |
| no values | NaN |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from qgate.registry import Registry


@dataclass(frozen=True)
class ErrorSums:
    """Sums over pairs of an actual and a reference value; `m2` and `co` are centered."""

    count: int
    mean_actual: float
    mean_reference: float
    m2_actual: float
    m2_reference: float
    co: float
    sum_square_actual: float
    sum_square_reference: float
    dot: float
    sum_square_error: float
    sum_abs_error: float
    sum_error: float
    max_abs_error: float
    sum_abs_reference: float
    max_abs_reference: float


@dataclass(frozen=True)
class Metric:
    name: str
    label: str
    unit: str
    direction: Literal["lower", "higher"]
    definition: str
    function: Callable[[ErrorSums], float]


METRICS: Registry[Metric] = Registry("metric")


def _ratio(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return 0.0 if part == 0 else math.inf


def _db(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _cosine(s: ErrorSums) -> float:
    if s.sum_square_error == 0:
        return 1.0
    size = math.sqrt(s.sum_square_actual) * math.sqrt(s.sum_square_reference)
    return max(-1.0, min(1.0, s.dot / size)) if size else 0.0


def _correlation(s: ErrorSums) -> float:
    if s.sum_square_error == 0:
        return 1.0
    size = math.sqrt(s.m2_actual) * math.sqrt(s.m2_reference)
    return max(-1.0, min(1.0, s.co / size)) if size else 0.0


def _over(count: int, total: float) -> float:
    return total / count if count else math.nan


_ALL: list[tuple[str, str, str, Literal["lower", "higher"], str, Callable[[ErrorSums], float]]] = [
    (
        "sqnr_db",
        "SQNR",
        "dB",
        "higher",
        "10 log10(sum r^2 / sum (a - r)^2)",
        lambda s: _db(s.sum_square_reference, s.sum_square_error),
    ),
    ("mse", "MSE", "", "lower", "mean (a - r)^2", lambda s: _over(s.count, s.sum_square_error)),
    (
        "rmse",
        "RMSE",
        "",
        "lower",
        "square root of the MSE",
        lambda s: math.sqrt(_over(s.count, s.sum_square_error)),
    ),
    ("mae", "MAE", "", "lower", "mean |a - r|", lambda s: _over(s.count, s.sum_abs_error)),
    ("max_abs", "Max Abs Error", "", "lower", "max |a - r|", lambda s: s.max_abs_error),
    (
        "mean_error",
        "Mean Error",
        "",
        "lower",
        "mean (a - r)",
        lambda s: _over(s.count, s.sum_error),
    ),
    (
        "relative_mse",
        "Relative MSE",
        "",
        "lower",
        "sum (a - r)^2 / sum r^2",
        lambda s: _ratio(s.sum_square_error, s.sum_square_reference),
    ),
    (
        "relative_mae",
        "Relative MAE",
        "",
        "lower",
        "sum |a - r| / sum |r|",
        lambda s: _ratio(s.sum_abs_error, s.sum_abs_reference),
    ),
    (
        "relative_error",
        "Relative Error",
        "%",
        "lower",
        "100 MAE / mean |r|",
        lambda s: 100 * _ratio(s.sum_abs_error, s.sum_abs_reference),
    ),
    ("cosine", "Cosine Similarity", "", "higher", "sum a r / (|a| |r|)", _cosine),
    ("correlation", "Correlation", "", "higher", "Pearson's, of a and r", _correlation),
    (
        "psnr_db",
        "PSNR",
        "dB",
        "higher",
        "20 log10(max |r| / RMSE)",
        lambda s: _db(s.max_abs_reference**2, _over(s.count, s.sum_square_error)),
    ),
]

for _entry in _ALL:
    METRICS.add(Metric(*_entry))
