"""What is read from a tensor while the model waits, and the figures that are made of it later.

Extremes and non-finite values are of every element. Counts of a large tensor are of a seeded share
of its elements, because reading all of them would take longer than the layer itself. On the CPU it
is numpy that reads: one thread, no barrier that a busy machine makes a hundred times slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgate.stats._bits import COUNTABLE, decoded, short_name

Array = np.ndarray[Any, Any]

_RUN = 16
"""Neighbors that are sampled together: a line of cache, so that a sample costs what it holds."""


@dataclass
class Reading:
    """What a tensor showed: `sample` is bit patterns of a type that is counted, else values.

    low, high   the finite extremes; NaN where nothing is finite
    counted     how many of the elements the sample is
    counts      how often each pattern occurs, where that was counted at once
    sums        sum and sum of squares of the finite values, where that was added up at once
    """

    dtype: torch.dtype
    elements: int
    low: float
    high: float
    nonfinite: dict[str, int]
    counted: int
    sample: Array | None = None
    counts: Array | None = None
    sums: tuple[float, float] | None = None

    @property
    def counted_as(self) -> torch.dtype | None:
        """The dtype whose bit patterns are counted; None where nothing is."""
        if self.dtype in COUNTABLE:
            return self.dtype
        return torch.bfloat16 if self.dtype.is_floating_point else None


@dataclass(frozen=True)
class Figures:
    """What a record says of a tensor's values."""

    stats: dict[str, float]
    nonfinite: dict[str, int]
    sampled: float
    counts: dict[str, Array] | None
    counted_as: str


def can_be_read(x: Tensor) -> bool:
    return x.layout == torch.strided and (
        x.dtype in COUNTABLE
        or x.dtype in (torch.float32, torch.float64, torch.bool)
        or x.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    )


def read(x: Tensor, most: int | None, seed: int) -> Reading:
    """Of a tensor on the CPU; `most` elements are sampled, all of them without it."""
    x = x.detach()
    flat = _array(x)
    low, high, nonfinite = _extremes(flat, x.dtype)
    if most is None or x.numel() <= most:
        return Reading(x.dtype, x.numel(), low, high, nonfinite, x.numel(), flat.ravel().copy())
    offsets = _offsets(tuple(x.shape), x.stride(), most, seed)
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    sample = _array(x.as_strided((extent,), (1,))).take(offsets)
    return Reading(x.dtype, x.numel(), low, high, nonfinite, len(sample), sample)


def figures(reading: Reading) -> Figures:
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


def _array(x: Tensor) -> Array:
    """The same memory in numpy; formats that numpy lacks as their bits."""
    x = x.detach().resolve_neg()
    if x.dtype in COUNTABLE:
        signed = x.view(COUNTABLE[x.dtype]).numpy()
        return signed.view(np.uint8 if signed.itemsize == 1 else np.uint16)
    return x.numpy()


def _extremes(flat: Array, dtype: torch.dtype) -> tuple[float, float, dict[str, int]]:
    """The finite extremes, and how many values of each kind are not finite."""
    none = {"nan": 0, "posinf": 0, "neginf": 0}
    if not flat.size:
        return math.nan, math.nan, none
    if dtype in COUNTABLE and flat.itemsize == 1:
        return _extremes_of_counts(np.bincount(flat.ravel(), minlength=256), dtype)
    if dtype in COUNTABLE:
        low, high = _extremes_of_bits(flat, dtype)
        if math.isfinite(low) and math.isfinite(high):
            return low, high, none
        return _extremes_of_counts(np.bincount(flat.ravel(), minlength=2**16), dtype)
    with np.errstate(invalid="ignore"):
        low, high = float(flat.min()), float(flat.max())
    if math.isfinite(low) and math.isfinite(high):
        return low, high, none
    there = flat[np.isfinite(flat)]
    kinds = {
        "nan": int(np.isnan(flat).sum()),
        "posinf": int((flat == np.inf).sum()),
        "neginf": int((flat == -np.inf).sum()),
    }
    if not there.size:
        return math.nan, math.nan, kinds
    return float(there.min()), float(there.max()), kinds


def _extremes_of_bits(flat: Array, dtype: torch.dtype) -> tuple[float, float]:
    """Of 16-bit patterns, which ascend in magnitude above a sign bit: two fast passes."""
    table = value_table(dtype)
    largest, top = int(flat.max()), int(flat.view(np.int16).max())
    low = largest if largest >= 2**15 else int(flat.min())
    high = top if top >= 0 else int(flat.min())
    return float(table[low]), float(table[high])


def _extremes_of_counts(counts: Array, dtype: torch.dtype) -> tuple[float, float, dict[str, int]]:
    table = value_table(dtype)
    there = table[(counts > 0) & np.isfinite(table)]
    kinds = {
        "nan": int(counts[np.isnan(table)].sum()),
        "posinf": int(counts[table == np.inf].sum()),
        "neginf": int(counts[table == -np.inf].sum()),
    }
    if not there.size:
        return math.nan, math.nan, kinds
    return float(there.min()), float(there.max()), kinds


@lru_cache(maxsize=8)
def value_table(dtype: torch.dtype) -> Array:
    """The value of each bit pattern."""
    return decoded(dtype)


@lru_cache(maxsize=64)
def _offsets(shape: tuple[int, ...], stride: tuple[int, ...], most: int, seed: int) -> Array:
    """Where in memory the sampled elements of a tensor of this layout are, in ascending order."""
    elements = math.prod(shape)
    run = math.gcd(_RUN, shape[-1]) if stride[-1] == 1 else 1
    random = np.random.default_rng([seed, *shape])
    chosen = np.sort(random.choice(elements // run, max(most // run, 1), replace=False)) * run
    places = np.unravel_index(chosen, shape)
    start = sum(place * step for place, step in zip(places, stride, strict=True))
    return np.asarray((np.asarray(start)[:, None] + np.arange(run)).ravel(), dtype=np.intp)


def _counts(reading: Reading) -> Array | None:
    if reading.counted_as is None or (reading.counts is None and reading.sample is None):
        return None
    if reading.counts is None and reading.sample is not None:
        bits = reading.sample
        if reading.dtype not in COUNTABLE:
            bits = _rounded_to_bf16(bits)
        reading.counts = np.bincount(bits, minlength=256 if bits.itemsize == 1 else 2**16)
    return reading.counts


def _rounded_to_bf16(x: Array) -> Array:
    """Bit patterns, rounded to nearest, ties to even; NaN stays NaN."""
    with np.errstate(over="ignore"):
        bits = x.astype(np.float32, copy=False).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    rounded[np.isnan(x)] = 0x7FC0
    return rounded


def _patterns(counts: Array) -> dict[str, Array]:
    """The patterns that occur, and how often: a few kilobytes of the 65,536 places."""
    there = np.flatnonzero(counts)
    narrow = np.uint32 if not there.size or counts.max() < 2**32 else np.uint64
    return {"patterns": there.astype(np.uint16), "counts": counts[there].astype(narrow)}


def _moments(reading: Reading) -> tuple[float, float]:
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
        values = values[np.isfinite(values)]
        weights = np.ones(len(values))
    else:
        return math.nan, math.nan
    n = weights.sum()
    if not n:
        return math.nan, math.nan
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(np.dot(values, weights) / n)
        return mean, math.sqrt(float(np.dot((values - mean) ** 2, weights) / n))
