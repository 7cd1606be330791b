"""The loss scale: a power of two that saves the gradients that a format would make zero."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from qgate.errors import QgateError
from qgate.formats import ElementFormat
from qgate.scales.levels import ceil_log2_ratio, floor_log2_ratio
from qgate.scales.search import exponents_near, squared_errors
from qgate.stats.summary import Floats, Ints, distinct
from qgate.summaries.outcomes import target_of
from qgate.summaries.pool import Pool
from qgate.summaries.pooling import pool_of
from qgate.summaries.record import LossScale

_CLOSE = 10**0.01
_ONE_IN = 1000
"""One in so many of the gradients that are not zero may be flushed."""


def loss_scale(x: Pool | Tensor, fmt: str) -> LossScale | None:
    """Return the least, the largest and the advised exponent; None where every gradient is zero.

    The advised exponent is the one from least to largest that is nearest to no scaling, or the
    largest where the least is above it. A tapered format is precise near 1 only, so for it the
    advised one may also cost no more than 0.1 dB against the best between them.

    The values of a tensor wider than 16 bits are rounded to bf16; the largest is exact.
    """
    target = target_of(fmt)
    if target.kind != "element" or target.always_scaled or not target.signed:
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


def _precise(fmt: ElementFormat, sizes: Floats, weights: Ints, scales: Sequence[int]) -> list[int]:
    """Return the loss scales, by exponent, at which the squared error is close to the least."""
    near = exponents_near(fmt, float(sizes[-1]))
    exponents = [k for k in scales if -k in near] or [*scales]
    errors = squared_errors(fmt, sizes, weights.astype(np.float64), [-k for k in exponents])
    return [k for k, error in zip(exponents, errors, strict=True) if error <= _CLOSE * errors.min()]


def _sizes(pool: Pool) -> tuple[Floats, Ints]:
    """Return magnitudes that are not zero, ascending, and how often each occurs."""
    values, weights = pool.weighted
    sizes, weights = distinct(np.abs(values), weights)
    sizes, weights = sizes[sizes > 0], weights[sizes > 0]
    if pool.vanished:
        # These were too small to be counted; none is smaller than the least.
        sizes, weights = np.append(pool.least, sizes), np.append(pool.vanished, weights)
    return sizes, weights


def _flushed_share(fmt: ElementFormat, sizes: Floats, weights: Ints, exponent: int) -> float:
    """Return the share that is flushed after multiplication with 2**exponent."""
    flushed = sizes < math.ldexp(fmt.survives_from(), -exponent)
    return float(weights[flushed].sum() / weights.sum())
