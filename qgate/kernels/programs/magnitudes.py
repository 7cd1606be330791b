"""The largest magnitude of a tensor."""

import triton
import triton.language as tl


@triton.jit
def largest(x, found, n, TILE: tl.constexpr, MASK: tl.constexpr):
    """As bits without the sign, which are in the order of the numbers; NaN is above Inf."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    size = tl.load(x + at, mask=at < n, other=0).to(tl.int32) & MASK
    tl.atomic_max(found, tl.max(size, 0), sem="relaxed")
