"""The metrics: numbers read from the error sums of one comparison.

a is actual, r is reference, an error is a - r. Results where a formula has nothing to divide by:

| metric | no error | r is 0, error is not | constant a or r, with error | no pairs |
|---|---|---|---|---|
| sqnr_db, psnr_db | inf | -inf | as defined | NaN |
| mse, rmse, mae, max_abs, mean_error | 0 | as defined | as defined | NaN |
| relative_mse, relative_mae, relative_error | 0 | inf | as defined | NaN |
| cosine | 1 | 0 | as defined | NaN |
| correlation | 1 | 0 | 0 | NaN |

"No error" also holds where both sides are zero, and cosine is 0 where only a is. A result below the
smallest float64 is that smallest float64, never 0: 0 says that there is no error. Sums whose
squares were lost, because whoever filled them left the scales at 1, give NaN, which no limit lets
pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from qgate.registry import Registry
from qgate.stats._sums import ErrorSums

__all__ = ["METRICS", "ErrorSums", "Metric"]

Function = Callable[[ErrorSums], float]
_SMALLEST = 5e-324


@dataclass(frozen=True)
class Metric:
    """One number read from error sums; `function` is pure and gives NaN for no pairs.

    `direction` says which way is better. A signed metric is better the nearer it is to zero: a
    limit is about its magnitude.
    """

    name: str
    label: str
    unit: str
    direction: Literal["lower", "higher"]
    definition: str
    function: Function
    signed: bool = False


METRICS: Registry[Metric] = Registry("metric")


def _metric(
    name: str,
    label: str,
    unit: str,
    direction: Literal["lower", "higher"],
    definition: str,
    *,
    exact: float,
    signed: bool = False,
) -> Callable[[Function], Function]:
    """Register a formula that need not think of no pairs, nor of no error: that is `exact`."""

    def register(formula: Function) -> Function:
        @functools.wraps(formula)
        def function(sums: ErrorSums) -> float:
            if not sums.count:
                return math.nan
            return exact if sums.max_abs_error == 0 else formula(sums)

        METRICS.add(Metric(name, label, unit, direction, definition, function, signed))
        return function

    return register


def _squares(total: float, largest: float) -> float:
    """A sum of squares, NaN if it is 0 although the largest value is not."""
    return math.nan if total == 0 and largest != 0 else total


def _error_squares(s: ErrorSums) -> float:
    return _squares(s.sum_square_error, s.max_abs_error)


def _reference_squares(s: ErrorSums) -> float:
    return _squares(s.sum_square_reference, s.max_abs_reference)


def _magnitudes(s: ErrorSums) -> float:
    """Error over reference."""
    if s.sum_abs_reference == 0:
        return math.inf
    return s.sum_abs_error / s.sum_abs_reference * (s.scale_error / s.scale_reference)


def _not_zero(x: float) -> float:
    return _SMALLEST if x == 0 else x


def _log10(x: float) -> float:
    return math.log10(x) if x else -math.inf


def _clamped(product: float, a_square: float, r_square: float) -> float:
    """product / sqrt(a_square * r_square), 0 where a side has nothing; rounding stays within 1."""
    size = math.sqrt(a_square) * math.sqrt(r_square)
    if not size:
        return 0.0
    found = product / size
    return found if math.isnan(found) else max(-1.0, min(1.0, found))


@_metric("sqnr_db", "SQNR", "dB", "higher", "10 log10(sum r^2 / sum (a - r)^2)", exact=math.inf)
def _sqnr_db(s: ErrorSums) -> float:
    scales = _log10(s.scale_reference) - _log10(s.scale_error)
    return 10 * (_log10(_reference_squares(s)) - _log10(_error_squares(s))) + 20 * scales


@_metric("mse", "MSE", "", "lower", "mean (a - r)^2", exact=0.0)
def _mse(s: ErrorSums) -> float:
    return _not_zero(_error_squares(s) / s.count * s.scale_error * s.scale_error)


@_metric("rmse", "RMSE", "", "lower", "square root of the MSE", exact=0.0)
def _rmse(s: ErrorSums) -> float:
    return _not_zero(math.sqrt(_error_squares(s) / s.count) * s.scale_error)


@_metric("mae", "MAE", "", "lower", "mean |a - r|", exact=0.0)
def _mae(s: ErrorSums) -> float:
    return _not_zero(s.sum_abs_error / s.count * s.scale_error)


@_metric("max_abs", "Max Abs Error", "", "lower", "max |a - r|", exact=0.0)
def _max_abs(s: ErrorSums) -> float:
    return s.max_abs_error * s.scale_error


@_metric("mean_error", "Mean Error", "", "lower", "mean (a - r)", exact=0.0, signed=True)
def _mean_error(s: ErrorSums) -> float:
    return s.sum_error / s.count * s.scale_error


@_metric("relative_mse", "Relative MSE", "", "lower", "sum (a - r)^2 / sum r^2", exact=0.0)
def _relative_mse(s: ErrorSums) -> float:
    reference = _reference_squares(s)
    if reference == 0:
        return math.inf
    scale = s.scale_error / s.scale_reference
    return _not_zero(_error_squares(s) / reference * scale * scale)


@_metric("relative_mae", "Relative MAE", "", "lower", "sum |a - r| / sum |r|", exact=0.0)
def _relative_mae(s: ErrorSums) -> float:
    return _not_zero(_magnitudes(s))


@_metric("relative_error", "Relative Error", "%", "lower", "100 MAE / mean |r|", exact=0.0)
def _relative_error(s: ErrorSums) -> float:
    return _not_zero(100 * _magnitudes(s))


@_metric("cosine", "Cosine Similarity", "", "higher", "sum a r / (|a| |r|)", exact=1.0)
def _cosine(s: ErrorSums) -> float:
    return _clamped(s.dot, s.sum_square_actual, _reference_squares(s))


@_metric("correlation", "Correlation", "", "higher", "Pearson's, of a and r", exact=1.0)
def _correlation(s: ErrorSums) -> float:
    return _clamped(s.co, s.m2_actual, s.m2_reference)


@_metric("psnr_db", "PSNR", "dB", "higher", "20 log10(max |r| / RMSE)", exact=math.inf)
def _psnr_db(s: ErrorSums) -> float:
    scales = _log10(s.scale_reference) - _log10(s.scale_error)
    noise = _log10(_error_squares(s) / s.count)
    return 20 * (_log10(s.max_abs_reference) + scales) - 10 * noise
