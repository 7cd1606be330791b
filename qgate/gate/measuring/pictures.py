"""Data that a gate keeps to draw its tensors later, in a few thousand bytes.

Computed in every gate that may be drawn, so it is cheap: large tensors are sampled at a fixed
stride, which has no divisor in common with the last axis, so that no channel is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from qgate import formats
from qgate.errors import QgateError
from qgate.results.pictures import (
    Density,
    ErrorBins,
    ErrorPicture,
    MagnitudePicture,
    Octaves,
    WorstChannel,
)
from qgate.stats import ErrorStats

MOST = 1 << 16
"""Elements that are sampled; of more every n-th one."""
BINS = 41
SIZE = 40
LOW = -10
"""First octave: magnitudes below 2^-9 of the rms are all in it."""
WORST = 8
# Errors are drawn to this many times their rms, and values to asinh(80,000): one wild element
# leaves the rest its room.
_ERROR_RMS = 4.0
_FARTHEST = 12.0
# A logarithm below those of all numbers there are, so that zero can be accepted.
_LEAST = -200.0

Floats = npt.NDArray[np.float64]
Pairs = Sequence[tuple[Tensor, Tensor]]


def error_picture(pairs: Pairs, stats: ErrorStats | None = None) -> ErrorPicture:
    """Draw actual against reference over all pairs together, on any device and of any dtype.

    What is not finite on either side is in no count. `stats` adds the worst channels, if it was
    made with a `channel_axis`; they are of all elements.
    """
    for a, r in pairs:
        if a.shape != r.shape:
            raise QgateError(
                f"a tensor of shape {tuple(a.shape)} cannot be drawn against {tuple(r.shape)}."
            )
    elements = sum(a.numel() for a, _ in pairs)
    step = stride(elements, pairs[0][0].shape[-1] if pairs and pairs[0][0].dim() else 1)
    actual, reference = (_sampled([pair[side] for pair in pairs], step) for side in (0, 1))
    sampled = len(actual)
    with np.errstate(over="ignore", invalid="ignore"):
        error = actual - reference
    fit = np.isfinite(actual) & np.isfinite(reference) & np.isfinite(error)
    if not fit.all():
        actual, reference, error = actual[fit], reference[fit], error[fit]
    rms = _rms(reference)
    picture = ErrorPicture(
        kind="errors",
        elements=elements,
        sampled=sampled,
        rms=rms,
        bins=_bins(error),
        density=_density(actual, reference, rms),
        octaves=_octaves(error, reference, rms),
    )
    if stats is not None and stats.channels is not None:
        picture["channel_count"] = len(stats.channels)
        picture["channels"] = _channels(stats.channels)
    return picture


def stride(elements: int, width: int) -> int:
    """Return the step that takes at most MOST elements (and one per pair more)."""
    step = max(1, math.ceil(elements / MOST))
    while step > 1 and math.gcd(step, max(width, 1)) > 1:
        step += 1
    return step


def _sampled(tensors: Sequence[Tensor], step: int) -> Floats:
    parts = [t.detach().reshape(-1)[::step].cpu().double().numpy() for t in tensors]
    return np.concatenate(parts) if parts else np.zeros(0)


def _rms(x: Floats) -> float:
    largest = _largest(x)
    if largest == 0:
        return 0.0
    # No dot product: the threads of a BLAS wait for each other where cores are busy.
    return float(largest * math.sqrt(float(np.square(x / largest).mean())))


def _largest(x: Floats) -> float:
    return float(np.abs(x).max()) if len(x) else 0.0


def _bins(error: Floats) -> ErrorBins:
    edge = min(_largest(error), _ERROR_RMS * _rms(error))
    if edge == 0:
        return ErrorBins(edge=0.0, counts=[len(error)], below=0, above=0)
    below, above = int((error < -edge).sum()), int((error > edge).sum())
    inside = error if below + above == 0 else error[np.abs(error) <= edge]
    counts = np.bincount(_cells(inside / edge, BINS), minlength=BINS)
    return ErrorBins(edge=edge, counts=counts.tolist(), below=below, above=above)


def _cells(x: Floats, size: int) -> npt.NDArray[np.int64]:
    """Return which of `size` equal cells from -1 to 1; values beyond are in the last ones."""
    return np.clip((x + 1) * (size / 2), 0, size - 1).astype(np.int64)


def _density(actual: Floats, reference: Floats, rms: float) -> Density:
    if rms == 0:
        return Density(size=SIZE, edge=0.0, cells=[])
    with np.errstate(over="ignore"):
        x, y = np.arcsinh(reference / rms), np.arcsinh(actual / rms)
    edge = min(max(_largest(x), _largest(y)), _FARTHEST)
    counts = np.bincount(_cells(x / edge, SIZE) * SIZE + _cells(y / edge, SIZE))
    full = np.flatnonzero(counts)
    cells = np.column_stack([full // SIZE, full % SIZE, counts[full]])
    return Density(size=SIZE, edge=edge, cells=cells.reshape(-1).tolist())


def _octaves(error: Floats, reference: Floats, rms: float) -> Octaves:
    if rms == 0:
        return Octaves(
            low=0, error=[float(error.any())], energy=[0.0], elements=[len(error)]
        )  # fmt: skip
    size = np.abs(reference) / rms
    exponent = np.frexp(size)[1].astype(np.int64) - 1
    octave = np.where(size == 0, 0, np.maximum(exponent - LOW, 0))
    elements = np.bincount(octave)
    return Octaves(
        low=LOW,
        error=_shares(octave, error),
        energy=_shares(octave, reference),
        elements=elements.tolist(),
    )


def _shares(octave: npt.NDArray[np.int64], x: Floats) -> list[float]:
    """Return the share of each octave in the sum of squares."""
    largest = _largest(x)
    sums = np.bincount(octave, weights=np.square(x / largest) if largest else np.zeros(len(x)))
    total = float(sums.sum())
    return [_short(part / total) if total else 0.0 for part in sums.tolist()]


def _channels(channels: Any) -> list[WorstChannel]:
    squares = np.asarray(channels.sum_square_error, np.float64)
    total = float(squares.sum())
    if not (math.isfinite(total) and total > 0):
        return []
    relative = channels.sum_square_reference
    worst = np.argsort(-squares, kind="stable")[:WORST]
    return [
        WorstChannel(
            index=int(index),
            share=_short(squares[index] / total),
            relative_mse=_short(squares[index] / relative[index]) if relative[index] > 0 else None,
        )
        for index in worst
        if squares[index] > 0
    ]


def _short(x: float) -> float:
    """Round to four digits: plots show no more, and a record has many of them."""
    return float(f"{x:.4g}")


# Magnitudes -------------------------------------------------------------------------------------


def magnitude_picture(
    values: npt.ArrayLike | Tensor,
    weights: npt.ArrayLike | None = None,
    *,
    fmt: str = "",
    nonfinite: int = 0,
    saturated: int = 0,
    flushed: int = 0,
) -> MagnitudePicture:
    """Count the octaves of values that occur `weights` times each, or once.

    Without a format it is about the values alone. Values that are not finite are added to
    `nonfinite`, which a caller left out.
    """
    x = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else values
    x = np.asarray(x, np.float64).reshape(-1)
    often = None if weights is None else np.asarray(weights, np.float64).reshape(-1)
    finite = np.isfinite(x)
    wild = _total(~finite, often)
    if wild:
        x, often = x[finite], None if often is None else often[finite]
    zero = x == 0
    zeros = _total(zero, often)
    if zeros:
        x, often = x[~zero], None if often is None else often[~zero]
    exponent = np.frexp(x)[1]
    low = int(exponent.min()) - 1 if len(x) else 0
    counts = np.bincount(exponent - (low + 1), weights=often) if len(x) else np.zeros(0)
    largest, smallest = ends(fmt)
    return MagnitudePicture(
        kind="magnitudes",
        format=fmt,
        low=low,
        counts=[round(count) for count in counts.tolist()],
        zeros=zeros,
        nonfinite=nonfinite + wild,
        largest=largest,
        smallest=smallest,
        saturated=saturated,
        flushed=flushed,
    )


def _total(which: npt.NDArray[np.bool_], often: Floats | None) -> int:
    return int(which.sum()) if often is None else round(float(often[which].sum()))


@cache
def ends(fmt: str) -> tuple[float | None, float | None]:
    """Return log2 of a format's largest and smallest magnitude; None where scales move them."""
    form = formats.get(fmt) if fmt else None
    if form is None or form.kind == "block" or form.always_scaled:
        return None, None
    low, high = form.bounds()
    return math.log2(max(-low, high)), math.log2(form.min_subnormal)


def log2_or_least(value: float | None, unit: float = 1.0) -> float:
    """Return the logarithm of a size, and `_LEAST` for zero and None."""
    return math.log2(value) + math.log2(unit) if value is not None and value > 0 else _LEAST
