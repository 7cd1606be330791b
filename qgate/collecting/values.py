"""Readings of tensors while the model waits: as little as the figures need.

Extremes and non-finite values come from every element. Counts of a large tensor come from a seeded
share of its blocks, as reading all of them would take longer than the layer itself. The CPU reads
with numpy: one thread, no barrier that a busy machine makes a hundred times slower.
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

from qgate.stats.bits import COUNTABLE, decoded

Array = np.ndarray[Any, Any]

BLOCK = 32
"""Neighbors along the last dimension that are sampled together: an MX block, two cache lines."""

_PART = 2**16


@dataclass
class ValueReading:
    """Values read from a tensor: `sample` has bit patterns of a counted dtype, else values.

    low, high   finite extremes; NaN where nothing is finite
    counted     number of elements in the sample
    counts      occurrences of each pattern, where a device counted them
    sums        sum and sum of squares of the finite values, where a device added them
    lengths     lengths of the blocks in the sample, in order
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
    lengths: Array | None = None

    @property
    def counted_as(self) -> torch.dtype | None:
        """Dtype whose bit patterns are counted; None for integers."""
        if self.dtype in COUNTABLE:
            return self.dtype
        return torch.bfloat16 if self.dtype.is_floating_point else None


def can_be_read(x: Tensor) -> bool:
    return x.layout == torch.strided and (
        x.dtype in COUNTABLE
        or x.dtype in (torch.float32, torch.float64, torch.bool)
        or x.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    )


def read(x: Tensor, most: int | None, seed: int, into: Tensor | None = None) -> ValueReading:
    """Read a tensor on the CPU; `most` elements are sampled, or all.

    The tensor is copied to `into`, of the same shape and dtype, while its parts are in the cache.
    """
    x = x.detach()
    flat = array_of(x)
    low, high, nonfinite = _extremes(flat, x.dtype, None if into is None else array_of(into))
    if most is None or x.numel() <= most:
        sample, lengths = flat.ravel().copy(), all_blocks(tuple(x.shape))
    else:
        offsets, lengths = sampled_offsets(tuple(x.shape), x.stride(), most, seed)
        sample = array_of(memory_of(x)).take(offsets)
    return ValueReading(
        x.dtype, x.numel(), low, high, nonfinite, len(sample), sample, lengths=lengths
    )


def memory_of(x: Tensor) -> Tensor:
    """Return the memory from a tensor's first element to its last, flat."""
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((extent,), (1,))


def array_of(x: Tensor) -> Array:
    """Return the same memory in numpy; dtypes that numpy lacks as their bits.

    `x.numpy()` would keep the storage from changing its size, as storages of FSDP do.
    """
    x = x.detach().resolve_neg()
    if x.dtype in COUNTABLE:
        signed = np.from_dlpack(x.view(COUNTABLE[x.dtype]))
        return signed.view(np.uint8 if signed.itemsize == 1 else np.uint16)
    return np.from_dlpack(x)


def _extremes(
    flat: Array, dtype: torch.dtype, into: Array | None
) -> tuple[float, float, dict[str, int]]:
    """Return the finite extremes, and counts of non-finite values by kind."""
    none = {"nan": 0, "posinf": 0, "neginf": 0}
    if not flat.size:
        return math.nan, math.nan, none
    narrow = dtype in COUNTABLE
    extremes = []
    with np.errstate(invalid="ignore"):
        for part, copy in _parts(flat, into):
            if copy is not None:
                copy[...] = part
            extremes.append(_in_bits(part) if narrow else (part.min(), part.max()))
        lows, highs = zip(*extremes, strict=True)
        low, high = np.min(lows), np.max(highs)
    if not narrow and math.isfinite(low) and math.isfinite(high):
        return float(low), float(high), none
    if narrow and flat.itemsize == 2:
        low, high = _of_bits(flat, int(low), int(high), decoded(dtype))
        if math.isfinite(low) and math.isfinite(high):
            return low, high, none
    values, weights = _distinct(flat, dtype)
    finite = values[np.isfinite(values)]
    kinds = {
        "nan": int(weights[np.isnan(values)].sum()),
        "posinf": int(weights[values == np.inf].sum()),
        "neginf": int(weights[values == -np.inf].sum()),
    }
    if not finite.size:
        return math.nan, math.nan, kinds
    return float(finite.min()), float(finite.max()), kinds


def _parts(flat: Array, into: Array | None) -> Iterator[tuple[Array, Array | None]]:
    """Yield parts that fit the cache, with the part of `into` that each is copied to."""
    if flat.size <= _PART or not flat.flags.c_contiguous:
        yield flat, into
        return
    line, copy = flat.reshape(-1), None if into is None else into.reshape(-1)
    for start in range(0, flat.size, _PART):
        part = slice(start, start + _PART)
        yield line[part], None if copy is None else copy[part]


def _in_bits(part: Array) -> tuple[int, int]:
    """Return the largest pattern of either sign; patterns ascend with the magnitude.

    The first one is negated, so that several parts combine by minimum and maximum.
    """
    signed = part.view(np.int16 if part.itemsize == 2 else np.int8)
    return -int(part.max()), int(signed.max())


def _of_bits(flat: Array, low: int, high: int, table: Array) -> tuple[float, float]:
    least = -1
    if -low < 2**15 or high < 0:  # all of one sign: the other end is the smallest magnitude
        least = int(flat.min())
    return float(table[-low if -low >= 2**15 else least]), float(table[max(high, least)])


def _distinct(flat: Array, dtype: torch.dtype) -> tuple[Array, Array]:
    """Return distinct values with their counts; for wide dtypes every element, counted once."""
    if dtype not in COUNTABLE:
        return flat.reshape(-1), np.ones(flat.size, dtype=np.int64)
    counts = np.bincount(flat.reshape(-1), minlength=2 ** (8 * flat.itemsize))
    patterns = np.flatnonzero(counts)
    return decoded(dtype)[patterns], counts[patterns]


@lru_cache(maxsize=64)
def all_blocks(shape: tuple[int, ...]) -> Array:
    """Return the lengths of all blocks of a tensor; the last one of a row may be shorter."""
    width = shape[-1] if shape else 1
    if not width:
        return np.zeros(0, dtype=np.int8)
    row = np.full(-(-width // BLOCK), BLOCK, dtype=np.int8)
    row[-1] = width - BLOCK * (len(row) - 1)
    return np.tile(row, math.prod(shape[:-1]))


@lru_cache(maxsize=64)
def sampled_offsets(
    shape: tuple[int, ...], stride: tuple[int, ...], most: int, seed: int
) -> tuple[Array, Array]:
    """Return memory offsets of sampled elements, in order of their blocks, and block lengths.

    Blocks are sampled whole, with at most `most` elements together.
    """
    width, rows = shape[-1], math.prod(shape[:-1])
    in_row = -(-width // BLOCK)
    count = min(max(most * in_row // width, 1), rows * in_row)
    random = np.random.default_rng([seed, *shape])
    chosen = random.choice(rows * in_row, count, replace=False)
    fitting = max(int((np.cumsum(_lengths(chosen, width, in_row)) <= most).sum()), 1)
    chosen = np.sort(chosen[:fitting])
    lengths = _lengths(chosen, width, in_row)
    rows_at = np.unravel_index(chosen // in_row, shape[:-1]) if len(shape) > 1 else ()
    start = chosen % in_row * (BLOCK * stride[-1])
    start = start + sum(row * step for row, step in zip(rows_at, stride[:-1], strict=True))
    inside = np.arange(BLOCK)
    offsets = (start[:, None] + inside * stride[-1])[inside < lengths[:, None]]
    return np.asarray(offsets, dtype=np.intp), np.asarray(lengths, dtype=np.int8)


def _lengths(chosen: Array, width: int, in_row: int) -> Array:
    """Return the lengths of the blocks with these numbers."""
    return np.asarray(np.minimum(width - chosen % in_row * BLOCK, BLOCK))
