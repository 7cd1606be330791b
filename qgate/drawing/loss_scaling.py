"""Which power of two on the loss saves the gradients that a format would make zero."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from qgate.errors import QgateError
from qgate.formats import ElementFormat
from qgate.scales.levels import ceil_log2_ratio, floor_log2_ratio
from qgate.scales.search import exponents_near, squared_errors
from qgate.summaries.outcomes import Floats, Ints, target_of
from qgate.summaries.pool import Pool
from qgate.summaries.pooling import pool_of
from qgate.summaries.record import LossScale

_CLOSE = 10**0.01
_ONE_IN = 1000
"""So many of the gradients that are not zero may be flushed."""


def loss_scale(x: Pool | Tensor, fmt: str) -> LossScale | None:
    """The least and the largest exponent, and the one advised: that of them, or between them, which
    is nearest to no scaling; the largest, where what must not be flushed and what must not
    saturate leave none between. None where every gradient is zero.

    A tapered format is precise near 1 only: of it the one nearest to no scaling is advised that
    costs no more than 0.1 dB against the best between them.

    Of a tensor wider than 16 bits the values are those rounded to bf16; the largest is exact.
    """
    target = target_of(fmt)
    if target.kind != "element" or target.always_scaled:
        raise QgateError(
            f"{target.name} needs no loss scale: it is for formats that cast values as they are, "
            "such as fp16, e5m2 or hif8."
        )
    pool = x if isinstance(x, Pool) else pool_of(x)
    sizes, weights = _sizes(pool)
    if not len(sizes):
        return None
    first = int(np.searchsorted(np.cumsum(weights) * _ONE_IN, weights.sum(), side="right"))
    least = ceil_log2_ratio(target.survives_from(), float(sizes[first]))
    largest = floor_log2_ratio(math.nextafter(target.saturates_from(), 0), pool.amax)
    between: Sequence[int] = range(least, largest + 1)
    if target.tapered and len(between) > 1:
        between = _precise(target, sizes, weights, between)
    advised = min(between, key=abs, default=largest)
    return LossScale(
        format=target.name,
        least=least,
        largest=largest,
        advised=advised,
        flush=_flushed_share(target, sizes, weights, 0),
        at_best=_flushed_share(target, sizes, weights, advised),
    )


def _precise(fmt: ElementFormat, sizes: Floats, weights: Ints, all_of: Sequence[int]) -> list[int]:
    """Those of the exponents, as loss scales, at which the squared error is next to the least."""
    near = exponents_near(fmt, float(sizes[-1]))
    exponents = [k for k in all_of if -k in near] or [*all_of]
    errors = squared_errors(fmt, sizes, weights.astype(np.float64), [-k for k in exponents])
    return [k for k, error in zip(exponents, errors, strict=True) if error <= _CLOSE * errors.min()]


def _sizes(pool: Pool) -> tuple[Floats, Ints]:
    """Magnitudes that are not zero, ascending, and how often each occurs."""
    values, counts = pool.weighted
    sizes, place = np.unique(np.abs(values), return_inverse=True)
    weights = np.zeros(len(sizes), dtype=np.int64)
    np.add.at(weights, place, counts)
    sizes, weights = sizes[sizes > 0], weights[sizes > 0]
    if pool.vanished:
        # Too small to be counted: none of them is smaller than the least.
        sizes, weights = np.append(pool.least, sizes), np.append(pool.vanished, weights)
    return sizes, weights


def _flushed_share(fmt: ElementFormat, sizes: Floats, weights: Ints, exponent: int) -> float:
    """Return the part that is flushed after multiplication with 2**exponent."""
    lost = sizes < math.ldexp(fmt.survives_from(), -exponent)
    return float(weights[lost].sum() / weights.sum())
