"""The metrics that are read from the error sums of one comparison.

Each is a `Metric` of the source "errors": a is actual, r is reference, an error is a - r. Results
where a formula has nothing to divide by:

| metric | no error | r is 0, error is not | constant a or r, with error | no pairs |
|---|---|---|---|---|
| sqnr_db, psnr_db | inf | -inf | as defined | NaN |
| mse, rmse, mae, max_abs, mean_error | 0 | as defined | as defined | NaN |
| relative_mse, relative_mae, relative_error | 0 | inf | as defined | NaN |
| cosine | 1 | 0 | as defined | NaN |
| correlation | 1 | 0 | 0 | NaN |

"No error" also holds where both sides are zero, and cosine is 0 where only a is. A result below the
smallest float64 is that smallest float64, never 0: 0 says that there is no error. Sums whose
squares underflowed at scales of 1 give NaN, which passes no limit.
"""

from __future__ import annotations

import math

from qgate.metrics._table import METRICS, ErrorSumsLike, Metric

_SMALLEST = 5e-324


def _squares(total: float, largest: float) -> float:
    """Return a sum of squares, or NaN if it is 0 although the largest value is not."""
    return math.nan if total == 0 and largest != 0 else total


def _error_squares(s: ErrorSumsLike) -> float:
    return _squares(s.sum_square_error, s.max_abs_error)


def _reference_squares(s: ErrorSumsLike) -> float:
    return _squares(s.sum_square_reference, s.max_abs_reference)


def _magnitudes(s: ErrorSumsLike) -> float:
    """Return sum |error| / sum |reference|."""
    if s.sum_abs_reference == 0:
        return math.inf
    return s.sum_abs_error / s.sum_abs_reference * (s.scale_error / s.scale_reference)


def _not_zero(x: float) -> float:
    return _SMALLEST if x == 0 else x


def _log10(x: float) -> float:
    return math.log10(x) if x else -math.inf


def _clamped(product: float, a_square: float, r_square: float) -> float:
    """Return product / sqrt(a_square * r_square) within -1 and 1; 0 where a side is zero."""
    size = math.sqrt(a_square) * math.sqrt(r_square)
    if not size:
        return 0.0
    ratio = product / size
    return ratio if math.isnan(ratio) else max(-1.0, min(1.0, ratio))


def _scales_log10(s: ErrorSumsLike) -> float:
    return _log10(s.scale_reference) - _log10(s.scale_error)


def _sqnr_db(s: ErrorSumsLike) -> float:
    ratio = _log10(_reference_squares(s)) - _log10(_error_squares(s))
    return 10 * ratio + 20 * _scales_log10(s)


def _psnr_db(s: ErrorSumsLike) -> float:
    noise = _log10(_error_squares(s) / s.count)
    return 20 * (_log10(s.max_abs_reference) + _scales_log10(s)) - 10 * noise


def _relative_mse(s: ErrorSumsLike) -> float:
    reference = _reference_squares(s)
    if reference == 0:
        return math.inf
    scale = s.scale_error / s.scale_reference
    return _not_zero(_error_squares(s) / reference * scale * scale)


for _metric in (
    Metric(
        name="sqnr_db", label="SQNR", unit="dB", direction="higher", logarithm="decibel",
        definition="10 log10(sum r^2 / sum (a - r)^2)", exact=math.inf, formula=_sqnr_db,
    ),
    Metric(
        name="mse", label="MSE", direction="lower", degree=2, bands=(1e-4, 1e-3, 1e-2),
        definition="mean (a - r)^2",
        formula=lambda s: _not_zero(_error_squares(s) / s.count * s.scale_error * s.scale_error),
    ),
    Metric(
        name="rmse", label="RMSE", direction="lower", degree=1,
        definition="square root of the MSE",
        formula=lambda s: _not_zero(math.sqrt(_error_squares(s) / s.count) * s.scale_error),
    ),
    Metric(
        name="mae", label="MAE", direction="lower", degree=1, definition="mean |a - r|",
        formula=lambda s: _not_zero(s.sum_abs_error / s.count * s.scale_error),
    ),
    Metric(
        name="max_abs", label="Max Absolute Error", column="max abs", direction="lower", degree=1,
        definition="max |a - r|", formula=lambda s: s.max_abs_error * s.scale_error,
    ),
    Metric(
        name="mean_error", label="Mean Error", column="mean error", direction="lower", degree=1,
        signed=True, definition="mean (a - r)",
        formula=lambda s: s.sum_error / s.count * s.scale_error,
    ),
    Metric(
        name="relative_mse", label="Relative MSE", column="rel. MSE", direction="lower",
        relative=True, definition="sum (a - r)^2 / sum r^2", formula=_relative_mse,
    ),
    Metric(
        name="relative_mae", label="Relative MAE", column="rel. MAE", direction="lower",
        definition="sum |a - r| / sum |r|", formula=lambda s: _not_zero(_magnitudes(s)),
    ),
    Metric(
        name="relative_error", label="Relative Error", column="rel. error", unit="%",
        direction="lower", definition="100 MAE / mean |r|",
        formula=lambda s: _not_zero(100 * _magnitudes(s)),
    ),
    Metric(
        name="cosine", label="Cosine Similarity", column="cosine", direction="higher",
        bounded=True, exact=1.0, definition="sum a r / (|a| |r|)",
        formula=lambda s: _clamped(s.dot, s.sum_square_actual, _reference_squares(s)),
    ),
    Metric(
        name="correlation", label="Correlation", column="correlation", direction="higher",
        bounded=True, exact=1.0, definition="Pearson's, of a and r", bands=(0.9999, 0.999, 0.99),
        formula=lambda s: _clamped(s.co, s.m2_actual, s.m2_reference),
    ),
    Metric(
        name="psnr_db", label="PSNR", unit="dB", direction="higher", logarithm="decibel",
        definition="20 log10(max |r| / RMSE)", exact=math.inf, formula=_psnr_db,
    ),
):  # fmt: skip
    METRICS.add(_metric)
