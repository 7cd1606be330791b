"""Massive activations: a few elements so far above the rest that they hide the rest's errors.

One channel of 26 times the rms of the others kept a cosine at 0.9998 while the others were 15 % off
(paiml/aprender#2091). Whoever looks at such a tensor needs every metric without those elements too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from qgate.stats.direct_values import Values
from qgate.stats.summary import Floats
from qgate.stats.value_counts import Counts

# Between what was measured on both sides: block outputs of the two small models reach 13 times the
# rest and their linear layers' outputs without outlier channels 16; the published case is at 26.
TIMES = 20.0
# Massive elements are few: the largest 1 in 32 are no part of the rest, and so a channel out of 32,
# however large, does not raise what it is held against.
FEW = 32


def massive_beyond(reference: Tensor | Iterable[Tensor] | Counts | Values) -> float:
    """Return the magnitude above which an element is massive, inf if none is.

    The reference is a tensor, its parts, or what was counted of it. The result is `TIMES` the root
    mean square of the rest: of all finite elements but the largest 1 in `FEW`. The reference alone
    decides, so that what is measured cannot move its own yardstick.
    """
    if isinstance(reference, Counts):
        sizes, positive, negative = reference.folded()
        return _of_counts(sizes, positive + negative)
    if isinstance(reference, Values):
        return _of_values(reference)
    parts = [reference] if isinstance(reference, Tensor) else reference
    sizes = np.concatenate([_finite(part) for part in parts] or [np.empty(0, np.float32)])
    kept = _kept(len(sizes))
    if not kept:
        return math.inf
    largest = float(sizes.max())
    rest = np.partition(sizes, kept - 1)[:kept] if kept < len(sizes) else sizes
    return _beyond(_rms(rest), largest)


def _kept(n: int) -> int:
    """Count the elements that the others are held against."""
    return n - n // FEW


def _beyond(rms: float, largest: float) -> float:
    beyond = TIMES * rms
    # Of an all but empty tensor every element is beyond the rest, and none is massive.
    return beyond if 0 < beyond < largest else math.inf


def _of_counts(sizes: Floats, weights: Floats) -> float:
    """Take the rest from ascending magnitudes and how often each occurs."""
    return _beyond(_rest_rms(sizes, weights), float(sizes[-1])) if len(sizes) else math.inf


def _rest_rms(sizes: Floats, weights: Floats) -> float:
    kept = _kept(int(weights.sum()))
    taken = np.clip(kept - (np.cumsum(weights) - weights), 0.0, weights)
    rest, shares = sizes[taken > 0], taken[taken > 0] / kept
    unit = float(rest[-1]) or 1.0
    return unit * math.sqrt(float(np.square(rest / unit) @ shares))


def _of_values(values: Values) -> float:
    """Take the rest by passes over the values; nothing is copied whole."""
    kept = _kept(values.finite)
    if not kept or _at_least(values) >= values.amax:
        return math.inf
    last = values.ordered(kept - 1, "magnitude")
    unit, below, total = last or 1.0, 0, 0.0
    for chunk in values.chunks():
        sizes = np.abs(chunk)
        smaller = sizes[sizes < last]
        below += len(smaller)
        total += float(np.square(smaller / unit).sum())
    total += (kept - below) * (last / unit) ** 2
    return _beyond(unit * math.sqrt(total / kept), values.amax)


def _at_least(values: Values) -> float:
    """Bound the result from below in one pass, with 4 bits of each magnitude."""
    found = np.zeros(2**15, dtype=np.int64)
    for chunk in values.chunks():
        found += np.bincount(np.abs(chunk).view(np.int64) >> 48, minlength=2**15)
    there = np.flatnonzero(found)
    return TIMES * _rest_rms((there << 48).view(np.float64), found[there].astype(np.float64))


def _finite(part: Tensor) -> np.ndarray:
    sizes = part.detach().cpu().abs().reshape(-1)
    sizes = sizes if sizes.dtype.itemsize > 2 else sizes.float()
    found: np.ndarray = sizes[sizes.isfinite()].numpy()
    return found


def _rms(sizes: np.ndarray) -> float:
    unit = float(sizes.max())
    if unit == 0:
        return 0.0
    return unit * math.sqrt(float(np.square(sizes / unit, dtype=np.float64).mean()))
