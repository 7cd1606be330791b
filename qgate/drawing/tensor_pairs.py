"""The same tensor twice: how far they agree, and a scatter of one against the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.stats import errors
from qgate.summaries.figures import quantiles_of
from qgate.summaries.pool import Pool
from qgate.summaries.pooling import pool_of

Floats = npt.NDArray[np.float64]
_CHUNK = 2**17
_CENTRAL = (0.001, 0.999)
_METRICS = ("correlation", "relative_mse")


def pair_figures(actual: Tensor, reference: Tensor) -> dict[str, Any]:
    """Correlation and relative MSE of the pairs that are finite on both sides, and how many
    elements there are; what does not exist is left out."""
    _require_same(actual, reference)
    found = errors(_readable(actual), _readable(reference), worst=0)
    numbers = {name: found.metric(name, finite_only=True) for name in _METRICS}
    told: dict[str, Any] = {k: v for k, v in numbers.items() if math.isfinite(v)}
    return {**told, "elements": actual.numel()}


def central_range(*pools: Pool) -> tuple[float, float] | None:
    """From the least 0.001 quantile to the largest 0.999 one, or all there is where these are the
    same; None where there are not two values. For the scatter of many pairs on common axes."""
    found = [pool.weighted for pool in pools if len(pool.weighted[0])]
    if not found:
        return None
    inner = [quantiles_of(values, weights, np.array(_CENTRAL)) for values, weights in found]
    outer = [values[[0, -1]] for values, _ in found]
    for ends in (inner, outer):
        low, high = float(min(e[0] for e in ends)), float(max(e[1] for e in ends))
        if low < high:
            return low, high
    return None


def scatter_of(
    actual: Tensor,
    reference: Tensor,
    grid: int = 64,
    ends: tuple[float, float] | None = None,
) -> dict[str, Any] | None:
    """`counts[i][j]` is how many pairs have the reference in bin i and actual in bin j, of equal
    bins from `low` to `high`; `outside` are pairs that are not there, NaN and Inf among them.

    Without `ends` they are the central range of both. None where that is one number or nothing.
    """
    _require_same(actual, reference)
    if grid < 1:
        raise QgateError(f"grid {grid} is not allowed; it is at least 1.")
    if ends is None:
        ends = central_range(pool_of(actual), pool_of(reference))
        if ends is None:
            return None
    low, high = map(float, ends)
    if not (low < high and math.isfinite(high - low)):
        raise QgateError(f"a scatter from {low:g} to {high:g} is not allowed.")
    counts = np.zeros(grid * grid, dtype=np.int64)
    for a, r in zip(_chunks(actual), _chunks(reference), strict=True):
        inside = (a >= low) & (a <= high) & (r >= low) & (r <= high)
        i, j = (_bins(side[inside], low, high, grid) for side in (r, a))
        counts += np.bincount(i * grid + j, minlength=grid * grid)
    return {
        "low": low,
        "high": high,
        "counts": counts.reshape(grid, grid).tolist(),
        "outside": actual.numel() - int(counts.sum()),
    }


def merged_scatter(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The scatter of the pairs of both, which have the same axes."""
    axes = [(s["low"], s["high"], len(s["counts"])) for s in (a, b)]
    if axes[0] != axes[1]:
        raise QgateError(
            f"scatters over {axes[0]} and {axes[1]} (low, high, bins) make no common one: "
            "give both the same ends and grid."
        )
    counts = np.array(a["counts"], dtype=np.int64) + np.array(b["counts"], dtype=np.int64)
    return {**a, "counts": counts.tolist(), "outside": a["outside"] + b["outside"]}


def _require_same(actual: Tensor, reference: Tensor) -> None:
    if actual.shape != reference.shape:
        raise QgateError(
            f"actual has shape {tuple(actual.shape)} and reference {tuple(reference.shape)}: "
            "a pair has one shape."
        )
    for side in (actual, reference):
        if not side.is_floating_point():
            raise QgateError(f"a pair is of floating point numbers, not of {side.dtype}.")


def _readable(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16) if x.dtype.itemsize == 1 else x


def _chunks(x: Tensor) -> Iterator[Floats]:
    flat = x.detach().cpu().resolve_neg().reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK]
        part = part.to(torch.float32) if part.dtype.itemsize == 1 else part
        yield part.to(torch.float64).numpy()


def _bins(x: Floats, low: float, high: float, grid: int) -> npt.NDArray[np.int64]:
    place = ((x - low) / (high - low) * grid).astype(np.int64)
    return np.minimum(place, grid - 1)
