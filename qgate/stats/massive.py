"""Massive activations: a few elements so far above the rest that they hide the rest's errors.

One channel of 26 times the rms of the others kept a cosine at 0.9998 while the others were 15 % off
(paiml/aprender#2091). Such a tensor needs every metric without those elements too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from qgate.stats._portion import DTYPES
from qgate.stats.direct_values import Values
from qgate.stats.summary import Floats, Ints
from qgate.stats.value_counts import Counts
from qgate.tensor_inputs import plain_tensor, usual_arithmetic

# Between the measured cases: block outputs of the two small models reach 13 times the rest and
# their linear layers' outputs without outlier channels 16; the published case is at 26.
TIMES = 20.0
# Massive elements are few: the largest 1 in 32 are no part of the rest, so that one channel out of
# 32, however large, does not raise its own threshold.
FEW = 32


@usual_arithmetic()
def massive_beyond(reference: Tensor | Iterable[Tensor] | Counts | Values) -> float:
    """Return the magnitude above which an element is massive, inf if none is.

    The reference is a tensor, its parts, or its counts. The result is `TIMES` the root mean square
    of the rest: of all finite elements but the largest 1 in `FEW`. The reference alone decides, so
    that a measured tensor cannot move its own threshold.
    """
    if isinstance(reference, Counts):
        sizes, positive, negative = reference.folded()
        if not len(sizes):
            return math.inf
        return _beyond(_rest_rms(sizes, positive + negative), float(sizes[-1]))
    if isinstance(reference, Values):
        return _of_values(reference)
    parts = [reference] if isinstance(reference, Tensor) else reference
    sizes = np.concatenate([_finite(part) for part in parts] or [np.empty(0, np.float32)])
    n = _rest_size(len(sizes))
    if not n:
        return math.inf
    largest = float(sizes.max())
    smaller = np.partition(sizes, n - 1)[:n] if n < len(sizes) else sizes
    return _beyond(_rms(smaller), largest)


def _rest_size(n: int) -> int:
    """Return how many elements are the rest."""
    return n - n // FEW


def _beyond(rms: float, largest: float) -> float:
    beyond = TIMES * rms
    # Of an all but empty tensor every element is beyond the rest, and none is massive.
    return beyond if 0 < beyond < largest else math.inf


def _rest_rms(sizes: Floats, weights: Floats) -> float:
    """Return the rms of the rest, from ascending magnitudes and how often each occurs."""
    n = _rest_size(int(weights.sum()))
    in_rest = np.clip(n - (np.cumsum(weights) - weights), 0.0, weights)
    values, shares = sizes[in_rest > 0], in_rest[in_rest > 0] / n
    unit = float(values[-1]) or 1.0
    return unit * math.sqrt(float(np.square(values / unit) @ shares))


def _of_values(values: Values) -> float:
    """Return `massive_beyond` by passes over the values; nothing is copied whole."""
    n = _rest_size(values.finite)
    if not n or _at_least(values) >= values.amax:
        return math.inf
    last = values.ordered(n - 1, "magnitude")
    unit = last or 1.0

    def smaller(chunk: Floats) -> tuple[int, float]:
        sizes = np.abs(chunk)
        sizes = sizes[sizes < last]
        return len(sizes), float(np.square(sizes / unit).sum())

    numbers, sums = zip(*values.map_chunks(smaller), strict=True)
    below, total = sum(numbers), sum(sums)
    total += (n - below) * (last / unit) ** 2
    return _beyond(unit * math.sqrt(total / n), values.amax)


def _at_least(values: Values) -> float:
    """Bound the result from below in one pass, with 4 bits of each magnitude."""

    def counted(chunk: Floats) -> Ints:
        return np.bincount(np.abs(chunk).view(np.int64) >> 48, minlength=2**15)

    counts = np.zeros(2**15, dtype=np.int64)
    for part in values.map_chunks(counted):
        counts += part
    occurring = np.flatnonzero(counts)
    sizes, weights = (occurring << 48).view(np.float64), counts[occurring].astype(np.float64)
    return TIMES * _rest_rms(sizes, weights)


def _finite(part: Tensor) -> np.ndarray:
    plain = plain_tensor(part, "find massive values of", DTYPES)
    sizes = plain.detach().cpu().abs().reshape(-1)
    sizes = sizes if sizes.dtype.itemsize > 2 else sizes.float()
    finite = sizes.isfinite()
    # Choosing elements takes ten times as long as seeing that all are chosen.
    magnitudes: np.ndarray = (sizes if bool(finite.all()) else sizes[finite]).numpy()
    return magnitudes


def _rms(sizes: np.ndarray) -> float:
    unit = float(sizes.max())
    if unit == 0:
        return 0.0
    return unit * math.sqrt(float(np.square(sizes / unit, dtype=np.float64).mean()))
