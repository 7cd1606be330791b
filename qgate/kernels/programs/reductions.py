"""Programs that count bit patterns and find the largest magnitude."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_patterns(
    x, tables, n, TILE: tl.constexpr, PATTERNS: tl.constexpr, TABLES: tl.constexpr
):  # fmt: skip
    """Count 8-bit or 16-bit patterns; the tables add up to the counts.

    Zeros and the first pattern of a tile are counted in registers, because many equal numbers
    would wait for each other at one address.
    """
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    exists = at < n
    pattern = tl.load(x + at, mask=exists, other=0).to(tl.int32) & (PATTERNS - 1)
    first = tl.load(x + tl.program_id(0).to(tl.int64) * TILE).to(tl.int32) & (PATTERNS - 1)
    table = tables + (tl.program_id(0) % TABLES) * PATTERNS
    alike = exists & (pattern == first)
    zero = exists & (pattern == 0) & (first != 0)
    tl.atomic_add(table + first, tl.sum(alike.to(tl.int32), 0), sem="relaxed")
    tl.atomic_add(table, tl.sum(zero.to(tl.int32), 0), sem="relaxed")
    tl.atomic_add(
        table + pattern, 1, mask=exists & (pattern != first) & (pattern != 0), sem="relaxed"
    )


@triton.jit
def largest(x, maximum, n, TILE: tl.constexpr, MASK: tl.constexpr):
    """Find the largest bits without the sign, which have the numbers' order; NaN is above Inf."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    size = tl.load(x + at, mask=at < n, other=0).to(tl.int32) & MASK
    tl.atomic_max(maximum, tl.max(size, 0), sem="relaxed")
