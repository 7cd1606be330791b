"""Histograms whose bins hold equally many of the values that there can be.

Values are on a grid: of bf16, of a format that they were quantized to, or of integers with a scale.
Bins that are no multiple of its steps catch now more and now fewer of them, and draw a comb.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from qgate.summaries.record import Histogram

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BINS = 160
"""The most there are."""
_MOST_BITS, _MANY = 11, 64
_FEW_VALUES, _LEVELS = 8, 1024


def histogram_of(values: Floats, weights: Ints, low: float, high: float) -> Histogram | None:
    """Equal bins that reach from `low` to `high` and up to one further; None where these are the
    same. Zero is in the middle of a bin."""
    if not low < high:
        return None
    inside = (values >= low) & (values <= high)
    x, n = values[inside], weights[inside]
    step = max(_step(x, n), (high - low) * 2.0**-40)
    # An odd number of steps has zero, and any other value, in the middle.
    width = step * (math.ceil((high - low) / (step * (BINS - 1))) // 2 * 2 + 1)
    first, last = (math.floor(end / width + 0.5) for end in (low, high))
    counts = np.zeros(last - first + 1, dtype=np.int64)
    # Half of a value on an edge is on either side: with a finer grid below it, it is between both.
    above = np.floor(x / width + 0.5).astype(np.int64) - first
    below = np.ceil(x / width - 0.5).astype(np.int64) - first
    for places, part in ((above, n - n // 2), (below, n // 2)):
        np.add.at(counts, places.clip(0, last - first), part)
    return Histogram(low=(first - 0.5) * width, high=(last + 0.5) * width, counts=counts.tolist())


def _step(values: Floats, weights: Ints) -> float:
    """The largest step between neighbors of the grid that the values are on."""
    return _even_step(values) or _binary_step(values, weights)


def _even_step(values: Floats) -> float:
    """The step of values that are equally far apart, as integers with one scale; 0 of others."""
    if not _FEW_VALUES <= len(values) <= _LEVELS:
        return 0.0
    # Near zero all levels occur, and rounding to bf16 moves them least.
    near = values[np.abs(values) <= np.abs(values).max() / 4]
    step = float((near[-1] - near[0]) / (len(near) - 1)) if len(near) > 2 else 0.0
    for _ in range(3 if step else 0):
        levels = np.round(values / step)
        step = float(values @ levels) / max(float(levels @ levels), 1.0)
    if not step:
        return 0.0
    levels = np.round(values / step)
    even = (np.abs(values / step - levels) < 0.35).mean() > 0.95
    whole = len(np.unique(levels)) == len(values) > 0.75 * (levels[-1] - levels[0])
    return step if even and whole else 0.0


def _binary_step(values: Floats, weights: Ints) -> float:
    """The largest step of a floating point grid, as far as many values show it."""
    there = values != 0
    if not there.any():
        return 0.0
    fractions, exponents = np.frexp(np.abs(values[there]))
    bits = np.full(len(fractions), _MOST_BITS)
    for count in range(_MOST_BITS, 0, -1):
        scaled = np.ldexp(fractions, count)
        bits[scaled == np.floor(scaled)] = count - 1
    top = int(exponents.max())
    largest = math.ldexp(1.0, top - 1 - int(bits.max()))
    for exponent in np.unique(exponents).tolist():
        mine = exponents == exponent
        if mine.sum() > 2 and weights[there][mine].sum() >= _MANY:
            largest = max(largest, math.ldexp(1.0, exponent - 1 - int(bits[mine].max())))
    return largest
