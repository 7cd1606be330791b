"""What is read from a tensor while the model waits: as little as the figures need.

Extremes and non-finite values are of every element. Counts of a large tensor are of a seeded share
of its elements, because reading all of them would take longer than the layer itself. On the CPU it
is numpy that reads: one thread, no barrier that a busy machine makes a hundred times slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgate.stats._bits import COUNTABLE, decoded

Array = np.ndarray[Any, Any]

_RUN = 16
"""Neighbors that are sampled together: a line of cache, so that a sample costs what it holds."""


_PART = 2**16


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


def can_be_read(x: Tensor) -> bool:
    return x.layout == torch.strided and (
        x.dtype in COUNTABLE
        or x.dtype in (torch.float32, torch.float64, torch.bool)
        or x.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    )


def read(x: Tensor, most: int | None, seed: int, into: Tensor | None = None) -> Reading:
    """Of a tensor on the CPU; `most` elements are sampled, all of them without it.

    With `into`, of the same shape and dtype, it is copied there while its parts are at hand.
    """
    x = x.detach()
    flat = array_of(x)
    low, high, nonfinite = _extremes(flat, x.dtype, None if into is None else array_of(into))
    if most is None or x.numel() <= most:
        return Reading(x.dtype, x.numel(), low, high, nonfinite, x.numel(), flat.ravel().copy())
    offsets = _offsets(tuple(x.shape), x.stride(), most, seed)
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    sample = array_of(x.as_strided((extent,), (1,))).take(offsets)
    return Reading(x.dtype, x.numel(), low, high, nonfinite, len(sample), sample)


def array_of(x: Tensor) -> Array:
    """The same memory in numpy; formats that numpy lacks as their bits.

    `x.numpy()` would leave a mark: it forbids the storage to change its size, as FSDP's must.
    """
    x = x.detach().resolve_neg()
    if x.dtype in COUNTABLE:
        signed = np.from_dlpack(x.view(COUNTABLE[x.dtype]))
        return signed.view(np.uint8 if signed.itemsize == 1 else np.uint16)
    return np.from_dlpack(x)


def _extremes(
    flat: Array, dtype: torch.dtype, into: Array | None
) -> tuple[float, float, dict[str, int]]:
    """The finite extremes, and how many values of each kind are not finite."""
    none = {"nan": 0, "posinf": 0, "neginf": 0}
    if not flat.size:
        return math.nan, math.nan, none
    narrow = dtype in COUNTABLE
    found = []
    with np.errstate(invalid="ignore"):
        for part, copy in _parts(flat, into):
            if copy is not None:
                copy[...] = part
            found.append(_in_bits(part) if narrow else (part.min(), part.max()))
        lows, highs = zip(*found, strict=True)
        low, high = np.min(lows), np.max(highs)
    if not narrow and math.isfinite(low) and math.isfinite(high):
        return float(low), float(high), none
    if narrow and flat.itemsize == 2:
        low, high = _of_bits(flat, int(low), int(high), value_table(dtype))
        if math.isfinite(low) and math.isfinite(high):
            return low, high, none
    values, weights = _distinct(flat, dtype)
    there = values[np.isfinite(values)]
    kinds = {
        "nan": int(weights[np.isnan(values)].sum()),
        "posinf": int(weights[values == np.inf].sum()),
        "neginf": int(weights[values == -np.inf].sum()),
    }
    if not there.size:
        return math.nan, math.nan, kinds
    return float(there.min()), float(there.max()), kinds


def _parts(flat: Array, into: Array | None) -> Iterator[tuple[Array, Array | None]]:
    """Parts that stay in the cache while they are looked at twice, and where each is copied to."""
    if flat.size <= _PART or not flat.flags.c_contiguous:
        yield flat, into
        return
    line, copy = flat.reshape(-1), None if into is None else into.reshape(-1)
    for start in range(0, flat.size, _PART):
        part = slice(start, start + _PART)
        yield line[part], None if copy is None else copy[part]


def _in_bits(part: Array) -> tuple[int, int]:
    """The largest pattern of either sign, of patterns that ascend in magnitude above it.

    The first is negated, so that of several parts the least and the largest are asked for.
    """
    signed = part.view(np.int16 if part.itemsize == 2 else np.int8)
    return -int(part.max()), int(signed.max())


def _of_bits(flat: Array, low: int, high: int, table: Array) -> tuple[float, float]:
    least = -1
    if -low < 2**15 or high < 0:  # all of one sign: the other end is the smallest magnitude
        least = int(flat.min())
    return float(table[-low if -low >= 2**15 else least]), float(table[max(high, least)])


def _distinct(flat: Array, dtype: torch.dtype) -> tuple[Array, Array]:
    """Values with how often each occurs; of types with many values, each element once."""
    if dtype not in COUNTABLE:
        return flat.reshape(-1), np.ones(flat.size, dtype=np.int64)
    counts = np.bincount(flat.reshape(-1), minlength=2 ** (8 * flat.itemsize))
    there = np.flatnonzero(counts)
    return value_table(dtype)[there], counts[there]


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
