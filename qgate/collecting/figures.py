"""The figures of a record, made of a reading while the model runs on.

Plain numpy without `dot` and `@`: those wake the threads of a BLAS, which then take the model's
processors from it, and wait for work where it should run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from qgate.collecting.values import ValueReading, value_table
from qgate.stats.bits import COUNTABLE, short_name

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Figures:
    """What a record says of a tensor's values."""

    stats: dict[str, float]
    nonfinite: dict[str, int]
    sampled: float
    counts: dict[str, Array] | None
    counted_as: str


def figures_of(reading: ValueReading) -> Figures:
    """The figures of a reading, for which the model need not wait."""
    stats: dict[str, float] = {}
    finite = reading.elements - sum(reading.nonfinite.values())
    mean, std = _moments(reading)
    if finite:
        amax = max(abs(reading.low), abs(reading.high))
        stats = {"min": reading.low, "max": reading.high, "mean": mean, "std": std, "amax": amax}
    stats["elements"] = finite
    stats = {name: value for name, value in stats.items() if math.isfinite(value)}
    counts = _counts(reading)
    patterns = None if counts is None else _patterns(counts)
    told = reading.counted_as
    return Figures(
        stats,
        reading.nonfinite,
        reading.counted / reading.elements if reading.elements else 1.0,
        patterns,
        "" if told is None or patterns is None else short_name(told),
    )


def _counts(reading: ValueReading) -> Array | None:
    if reading.counted_as is None or (reading.counts is None and reading.sample is None):
        return None
    if reading.counts is None and reading.sample is not None:
        bits = reading.sample
        if reading.dtype not in COUNTABLE:
            bits = _rounded_to_bf16(bits, any_nan=reading.nonfinite["nan"] > 0)
        reading.counts = np.bincount(bits, minlength=256 if bits.itemsize == 1 else 2**16)
    return reading.counts


def _rounded_to_bf16(x: Array, *, any_nan: bool) -> Array:
    """Bit patterns, rounded to nearest, ties to even; NaN stays NaN."""
    with np.errstate(over="ignore"):
        bits = x.astype(np.float32, copy=False).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    if any_nan:
        rounded[np.isnan(x)] = 0x7FC0
    return rounded.astype(np.uint16)


def _patterns(counts: Array) -> dict[str, Array]:
    """The patterns that occur, and how often: a few kilobytes of the 65,536 places."""
    there = np.flatnonzero(counts)
    narrow = np.uint32 if not there.size or counts.max() < 2**32 else np.uint64
    return {"patterns": there.astype(np.uint16), "counts": counts[there].astype(narrow)}


def _moments(reading: ValueReading) -> tuple[float, float]:
    """Mean and standard deviation, as a population, of the finite values that were counted."""
    if reading.dtype in COUNTABLE:
        counts = _counts(reading)
        if counts is None:
            return math.nan, math.nan
        table = value_table(reading.dtype)
        there = (counts > 0) & np.isfinite(table)
        values, weights = table[there], counts[there]
    elif reading.sums is not None:
        n = max(reading.elements - sum(reading.nonfinite.values()), 1)
        mean = reading.sums[0] / n
        return mean, math.sqrt(max(reading.sums[1] / n - mean * mean, 0.0))
    elif reading.sample is not None:
        values = reading.sample.astype(np.float64)
        if any(reading.nonfinite.values()):
            values = values[np.isfinite(values)]
        return _plain_moments(values)
    else:
        return math.nan, math.nan
    n = weights.sum()
    if not n:
        return math.nan, math.nan
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float((values * weights).sum() / n)
        return mean, math.sqrt(float(((values - mean) ** 2 * weights).sum() / n))


def _plain_moments(values: Array) -> tuple[float, float]:
    if not values.size:
        return math.nan, math.nan
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(values.mean())
        values -= mean
        values *= values
        return mean, math.sqrt(float(values.sum()) / values.size)
