"""States along time: one program takes all steps of some states."""

import triton
import triton.language as tl


@triton.jit
def recur(
    factors, values, start, last, steps, size, TILE: tl.constexpr, BACKWARD: tl.constexpr
):  # fmt: skip
    """Replace values by the states after each step; with BACKWARD from the last to the first."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = at < size
    state = tl.load(start + at, mask=exists, other=0.0)
    place, stride = at.to(tl.int64), size
    if BACKWARD:
        place += (steps - 1).to(tl.int64) * size
        stride = -size
    for _ in range(0, steps):
        factor = tl.load(factors + place, mask=exists, other=0.0)
        value = tl.load(values + place, mask=exists, other=0.0)
        if BACKWARD:
            value += state
            state = factor * value
        else:
            value += factor * state
            state = value
        tl.store(values + place, value, mask=exists)
        place += stride
    tl.store(last + at, state, mask=exists)
