"""The metrics by their definitions in 80 decimal digits, which no float64 number leaves."""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterable

from torch import Tensor

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
        found = {
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
        return {name: float(value) for name, value in found.items()}


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
