"""The power of two that suits a format best: squared errors at every exponent near amax."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from qgate.formats import ElementFormat
from qgate.scales.levels import ceil_log2_ratio
from qgate.scales.rounding import round_rows
from qgate.stats import Values

Floats = npt.NDArray[np.float64]

REACH = 40
"""How far below and above the exponent of amax the search goes."""
SAME = 1e-9
"""Relative difference below which errors are equal: it is the rounding of their sums."""
_ROOM = 2**17
_AT_ONCE = 6
_FINE_BITS, _COARSE_BITS = 11, 5
_NEARLY, _MOST = 1.1, 4


def exponents_near(fmt: ElementFormat, amax: float) -> range:
    """Return the exponents among which the best one is.

    The values of a format at half the scale contain those at the whole scale, up to the largest:
    so nothing is gained above the smallest scale at which amax fits, unless the format is tapered.
    """
    middle, fits = math.frexp(amax)[1] - 1, ceil_log2_ratio(amax, fmt.max)
    last = middle + REACH if fmt.tapered else min(fits, middle + REACH)
    return range(min(middle - REACH, last), last + 1)


def squared_errors(
    fmt: ElementFormat, sizes: Floats, weights: Floats, exponents: Sequence[int]
) -> Floats:
    """Sum squared errors at each scale 2**exponent, in units of a power of two.

    `sizes` are magnitudes, the largest last, and `weights` how often each occurs.
    """
    unit = math.frexp(float(sizes[-1]))[1]
    whole = np.ldexp(sizes, -unit)
    errors = np.zeros(len(exponents))
    step = max(_ROOM // len(sizes), 1)
    for start in range(0, len(exponents), step):
        part = slice(start, start + step)
        scales = np.exp2(np.asarray(exponents[part], dtype=np.float64) - unit)[:, None]
        error = round_rows(fmt, whole / scales)
        np.multiply(error, scales, out=error)
        error -= whole
        np.multiply(error, error, out=error)
        errors[part] = error @ weights
    return errors


def best_exponent(fmt: ElementFormat, sizes: Floats, weights: Floats, near: float) -> int:
    """Find the exponent with the least squared error; of equals the one nearest `near`.

    The search goes down, and ends where the numbers beyond the format's largest value alone lose
    more than all do at the best exponent so far: at smaller scales they lose more still.
    """
    exponents = exponents_near(fmt, float(sizes[-1]))[::-1]
    unit = math.frexp(float(sizes[-1]))[1]
    whole, errors = np.ldexp(sizes, -unit), np.empty(0)
    while len(errors) < len(exponents):
        few = exponents[len(errors) : len(errors) + _AT_ONCE]
        errors = np.append(errors, squared_errors(fmt, sizes, weights, few))
        beyond = np.maximum(whole - math.ldexp(fmt.max, few[-1] - unit), 0.0)
        if float(np.square(beyond) @ weights) > errors.min() * (1 + 2 * SAME):
            break
    return _least(exponents[: len(errors)], errors, near)


def quick_best_exponent(fmt: ElementFormat, sizes: Floats, weights: Floats, near: float) -> int:
    """Find it among coarse bins of neighbors, then compare the best few exactly."""
    exponents = exponents_near(fmt, float(sizes[-1]))
    coarse = squared_errors(fmt, *_merge(sizes, weights, _COARSE_BITS), exponents)
    order = np.argsort(coarse, kind="stable")[:_MOST]
    few = [exponents[i] for i in order if coarse[i] <= _NEARLY * coarse[order[0]]]
    return _least(few, squared_errors(fmt, sizes, weights, few), near)


def _least(exponents: Sequence[int], errors: Floats, near: float) -> int:
    best = errors.min()
    same = [e for e, error in zip(exponents, errors, strict=True) if error <= best * (1 + SAME)]
    return min(same, key=lambda e: (abs(e - near), -e))


def merge_values(values: Values) -> tuple[Floats, Floats]:
    """Merge magnitudes of values that are not counted where they agree in 12 leading bits.

    Each stands for its mean, so numbers of few bits stay what they are.
    """
    unit = math.frexp(values.amax)[1]
    room = _bins(np.ones(1), _FINE_BITS)[0] + 1

    def binned(chunk: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
        sizes = np.ldexp(np.abs(chunk), -unit)
        bins = _bins(sizes, _FINE_BITS)
        numbers = np.asarray(np.bincount(bins, minlength=room), dtype=np.int64)
        return numbers, np.asarray(np.bincount(bins, sizes, minlength=room), dtype=np.float64)

    counts, sums = np.zeros(room), np.zeros(room)
    for numbers, totals in values.map_chunks(binned):
        counts += numbers
        sums += totals
    used = np.flatnonzero(counts)
    return np.ldexp(sums[used] / counts[used], unit), counts[used]


def _merge(sizes: Floats, weights: Floats, bits: int) -> tuple[Floats, Floats]:
    unit = math.frexp(float(sizes[-1]))[1]
    bins = _bins(np.ldexp(sizes, -unit), bits)
    _, starts = np.unique(bins, return_index=True)
    total = np.add.reduceat(weights, starts)
    means = np.add.reduceat(np.ldexp(sizes, -unit) * weights, starts) / total
    return np.ldexp(means, unit), total


@np.errstate(under="ignore")
def _bins(sizes: Floats, bits: int) -> npt.NDArray[np.int64]:
    """Bin magnitudes of at most 1 by their exponent and the leading bits of their mantissa."""
    single = sizes.astype(np.float32).view(np.int32)
    return (single >> (23 - bits)).astype(np.int64)
