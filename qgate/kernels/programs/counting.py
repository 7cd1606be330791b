"""How often each pattern occurs, by additions to tables in global memory."""

import triton
import triton.language as tl


@triton.jit
def count_patterns(
    x, tables, n, TILE: tl.constexpr, PATTERNS: tl.constexpr, TABLES: tl.constexpr
):  # fmt: skip
    """Of 8-bit or 16-bit patterns; the tables add up to the counts.

    Zeros, and whatever a tile begins with, are counted in the registers: many equal numbers would
    wait for each other at one address.
    """
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < n
    pattern = tl.load(x + at, mask=there, other=0).to(tl.int32) & (PATTERNS - 1)
    first = tl.load(x + tl.program_id(0).to(tl.int64) * TILE).to(tl.int32) & (PATTERNS - 1)
    table = tables + (tl.program_id(0) % TABLES) * PATTERNS
    alike = there & (pattern == first)
    zero = there & (pattern == 0) & (first != 0)
    tl.atomic_add(table + first, tl.sum(alike.to(tl.int32), 0), sem="relaxed")
    tl.atomic_add(table, tl.sum(zero.to(tl.int32), 0), sem="relaxed")
    tl.atomic_add(
        table + pattern, 1, mask=there & (pattern != first) & (pattern != 0), sem="relaxed"
    )
