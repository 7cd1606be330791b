"""The metrics by their definitions in 80 decimal digits, which no float64 number leaves."""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from qgate.stats._sums import ErrorSums, scale_for
from qgate.stats.summary import Floats

CONTEXT = decimal.Context(prec=80, Emin=-99999, Emax=99999)
Number = decimal.Decimal


def exact_metrics(actual: Tensor, reference: Tensor) -> dict[str, float]:
    """Every metric of finite tensors that differ and have variance, rounded once, at the end."""
    with decimal.localcontext(CONTEXT):
        a = [Number(x) for x in actual.double().flatten().tolist()]
        r = [Number(x) for x in reference.double().flatten().tolist()]
        e = [x - y for x, y in zip(a, r, strict=True)]
        n = len(a)
        mse, mae = _dot(e, e) / n, sum(map(abs, e)) / n
        mean_a, mean_r = sum(a) / n, sum(r) / n
        ca, cr = [x - mean_a for x in a], [x - mean_r for x in r]
        peak = max(map(abs, r))
        relative_mae = sum(map(abs, e)) / sum(map(abs, r))
        metrics = {
            "sqnr_db": 10 * (_dot(r, r) / _dot(e, e)).log10(),
            "mse": mse,
            "rmse": mse.sqrt(),
            "mae": mae,
            "max_abs": max(map(abs, e)),
            "mean_error": sum(e) / n,
            "relative_mse": _dot(e, e) / _dot(r, r),
            "relative_mae": relative_mae,
            "relative_error": 100 * relative_mae,
            "cosine": _dot(a, r) / (_dot(a, a) * _dot(r, r)).sqrt(),
            "correlation": _dot(ca, cr) / (_dot(ca, ca) * _dot(cr, cr)).sqrt(),
            "psnr_db": 20 * (peak / mse.sqrt()).log10(),
        }
        return {name: float(value) for name, value in metrics.items()}


def _dot(x: Iterable[Number], y: Iterable[Number]) -> Number:
    return sum((a * b for a, b in zip(x, y, strict=True)), Number(0))


def disagreement(found: dict[str, float], expected: dict[str, float]) -> dict[str, float]:
    """Relative differences; of a mean error relative to the MAE, which is what it may cancel from,
    and of cosine, correlation and small dB absolute ones. Three units in the last place of the
    smallest numbers, which have no more places, are no difference."""
    assert found.keys() == expected.keys()
    return {name: _apart(name, found, expected) for name in expected}


def _apart(name: str, found: dict[str, float], expected: dict[str, float]) -> float:
    x, y = found[name], expected[name]
    if x == y or (math.isnan(x) and math.isnan(y)) or abs(x - y) <= 3 * 5e-324:
        return 0.0
    whole = {"mean_error": expected["mae"], "cosine": 1.0, "correlation": 1.0}.get(name, abs(y))
    return abs(x - y) / (max(1.0, abs(y)) if name.endswith("_db") else whole)


def agree(found: dict[str, float], expected: dict[str, float], tolerance: float) -> None:
    far = {k: v for k, v in disagreement(found, expected).items() if not v <= tolerance}
    assert not far, {name: (found[name], expected[name]) for name in far}


def weighted_sums(
    actual: npt.ArrayLike, reference: npt.ArrayLike, weights: npt.ArrayLike
) -> ErrorSums:
    """The sums of pairs that occur `weights` times each: the definition, written out."""
    a, r = np.asarray(actual, np.float64), np.asarray(reference, np.float64)
    w = np.asarray(weights)
    a, r, w = a[w > 0], r[w > 0], w[w > 0]
    if not w.size:
        return ErrorSums()
    with np.errstate(over="ignore"):
        error, unit = a - r, 1.0
    if not np.isfinite(error).all():
        error, unit = a / 4 - r / 4, 4.0
    scale_actual = scale_for(float(np.abs(a).max()))
    scale_reference = scale_for(float(np.abs(r).max()))
    scale_error = scale_for(float(np.abs(error).max()))
    a, r, error = a / scale_actual, r / scale_reference, error / scale_error
    count, wide = int(w.sum()), w.astype(np.float64)
    mean_a, mean_r = _mean(a, wide), _mean(r, wide)
    return ErrorSums(
        count=count,
        mean_actual=mean_a,
        mean_reference=mean_r,
        m2_actual=_sum(wide * (a - mean_a) ** 2),
        m2_reference=_sum(wide * (r - mean_r) ** 2),
        co=_sum(wide * (a - mean_a) * (r - mean_r)),
        sum_square_actual=_sum(wide * a**2),
        sum_square_reference=_sum(wide * r**2),
        dot=_sum(wide * a * r),
        sum_square_error=_sum(wide * error**2),
        sum_abs_error=_sum(wide * np.abs(error)),
        sum_error=_sum(wide * error),
        max_abs_error=float(np.abs(error).max()),
        sum_abs_reference=_sum(wide * np.abs(r)),
        max_abs_reference=float(np.abs(r).max()),
        scale_actual=scale_actual,
        scale_reference=scale_reference,
        scale_error=scale_error * unit,
    )


def _mean(x: Floats, weights: Floats) -> float:
    """The mean, exactly the value where all values are equal: a constant has no variance."""
    first = float(x[0])
    return first if bool((x == first).all()) else _sum(weights * x) / _sum(weights)


def _sum(x: Floats) -> float:
    return math.fsum(x.tolist())
