"""Rounding of magnitudes to the grid of an element, with its bounds and its overflow."""

import triton
import triton.language as tl

from qgate.kernels.programs.grid import (
    EVEN,
    INFINITY,
    SIGN,
    ZERO,
    bits_of,
    exponent_of,
    number,
    round_to,
    round_to_step,
)


@triton.jit
def tapered_wide(a, ROUNDING: tl.constexpr):
    """Round float64 magnitudes to HiF8's mantissa bits: three near one, none below 2**-15."""
    field = exponent_of(a, -22)
    exponent = (field >> 52) - 1023
    far = tl.abs(exponent)
    bits = tl.where(far < 4, 3, tl.where(far < 8, 2, 1))
    return round_to_step(a, field, tl.where(exponent < -15, 0, bits).to(field.dtype), ROUNDING)


@triton.jit
def tapered(a, ROUNDING: tl.constexpr):
    """Do the same in float32."""
    field = tl.maximum(bits_of(a) & INFINITY, 105 << 23)
    far = tl.maximum(field, (254 << 23) - field)
    growth = tl.where(
        far < (131 << 23), 1048576.0, tl.where(far < (135 << 23), 2097152.0, 4194304.0)
    )
    growth = tl.where(field < (112 << 23), 8388608.0, growth)
    return round_to(a, number(field), growth, ROUNDING, True)


@triton.jit
def on_element_grid(
    a, lowest, growth, ROUNDING: tl.constexpr, FIXED: tl.constexpr, TAPERED: tl.constexpr,
    WIDE: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Round magnitudes to the element's grid: with WIDE, by constants, in float64."""
    if TAPERED:
        r = tapered_wide(a, ROUNDING) if WIDE else tapered(a, ROUNDING)
    elif WIDE:
        r = round_to_step(a, exponent_of(a, LOWEST), MANTISSA, ROUNDING)
    else:
        r = round_to(a, lowest, growth, ROUNDING, FIXED)
    if TAPERED and ROUNDING == EVEN:
        # Powers of two alternate between even and odd codes.
        r = tl.where(a == 1.5 * 2.0**-21, 2.0**-21, r)
        r = tl.where(a == 1.5 * 2.0**-19, 2.0**-19, r)
        r = tl.where(a == 1.5 * 2.0**-17, 2.0**-17, r)
    return r


@triton.jit
def bound_of(negative, largest, largest_negative, SYMMETRIC: tl.constexpr, SATURATES: tl.constexpr):
    """Return what no magnitude has to exceed to have the same result."""
    if not SATURATES:
        return 4.0 * largest
    elif SYMMETRIC:
        return largest
    else:
        return tl.where(negative, largest_negative, largest)


@triton.jit
def at_most(a, bound):
    """Return the smaller number, NaN of a NaN."""
    return tl.minimum(a, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def overflow(
    r, infinite, largest, ROUNDING: tl.constexpr, SATURATES: tl.constexpr,
    TO_INFINITY: tl.constexpr,
):  # fmt: skip
    """Replace numbers that rounded to more than the largest one."""
    if SATURATES:
        return r
    else:
        over = r > largest
        if ROUNDING == ZERO:
            r = tl.where(over, largest, r)
            over = infinite
        if TO_INFINITY:
            return tl.where(over, float("inf"), r).to(r.dtype)
        else:
            return tl.where(over, float("nan"), r).to(r.dtype)


@triton.jit
def with_sign(e, bits, SIGNED_ZERO: tl.constexpr):
    """Return float32 magnitudes with the sign of other numbers."""
    signed = number(bits_of(e) | (bits & SIGN))
    return signed if SIGNED_ZERO else signed + 0.0
