"""Casts with scales: the exact way, and a quick one for groups that need no remainders."""

import triton
import triton.language as tl

from qgate.kernels.programs.grid import (
    AWAY,
    BF16,
    EVEN,
    FP16,
    FP32,
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    ZERO,
    beside,
    bits_of,
    leading,
    narrow,
    number,
    product,
    round_once,
    side,
)
from qgate.kernels.programs.rounding import (
    at_most,
    bound_of,
    on_element_grid,
    overflow,
    tapered,
    with_sign,
)

GIVEN = tl.constexpr(0)
AMAX = tl.constexpr(1)
OWN = tl.constexpr(2)


@triton.jit
def scale_of(amax, largest, INF_SATURATES: tl.constexpr):
    """Return amax / largest, 1 for zeros, NaN where there is one or an Inf that does not saturate.

    Rounded once: a quotient of 24 and of at most 12 bits is on no tie of float32 unless exactly, so
    float64 between gives the same.
    """
    quotient = tl.div_rn(number(tl.minimum(amax, 0x7F7FFFFF)), largest)
    scale = tl.where(amax == 0, 0x3F800000, tl.maximum(bits_of(quotient), 1))
    spoilt = amax > INFINITY if INF_SATURATES else amax >= INFINITY
    return number(tl.where(spoilt, NAN, scale))


@triton.jit
def parts_of(scale, WIDE: tl.constexpr):
    """Return f, m, 1 / m and 1 / f of scales m / f, as `_scaled` takes them."""
    if WIDE:
        return scale, scale, scale, scale
    else:
        power = tl.minimum((254 << 23) - (bits_of(scale) & INFINITY), 254 << 23)
        power = tl.maximum(power, 1 << 23)
        back = tl.where(power == (254 << 23), 0x00400000, (254 << 23) - power)
        m = scale * number(power)
        return number(power), m, tl.div_rn(1.0, m), number(back)


@triton.jit
def _scaled(
    bits, scale, f, m, inverse, back, lowest, growth, largest, largest_negative, OUT: tl.constexpr,
    ROUNDING: tl.constexpr, FIXED: tl.constexpr, SYMMETRIC: tl.constexpr, TAPERED: tl.constexpr,
    SATURATES: tl.constexpr, TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    """Cast in float32 with float32 scales: a quotient, an element, a product, rounded once.

    The scale is s = m / f with a power of two f, and m in [1, 4), or less for subnormal scales.
    Quotients are a * f / m: what gets lost of a * f where that is subnormal belongs to quotients
    that are far below half of the smallest step. The product with 1 / m is a few units off, and its
    leading 12 bits have the ties; on which side of them the quotient is says the exact remainder.
    The product with m gets the bits of its result's dtype in the same way, and stays exact in the
    last product where that is a subnormal bf16 number, for it has 19 bits.
    """
    size = bits & MAGNITUDE
    bound = bound_of(bits < 0, largest, largest_negative, SYMMETRIC, SATURATES)
    a = at_most(number(size) * f, bound * m * 1.0000002384185791)
    if FIXED:
        # The ties of equal steps are multiples of half a step.
        magic = lowest * growth * 0.25
        near = (a * inverse + magic) - magic
        remainder = tl.fma(near, m * -1.0, a)
        quotient = tl.fma(side(remainder), magic * 5.960464477539063e-08, near)
    else:
        near = leading(a * inverse, 4096)
        quotient = beside(near, tl.fma(near, m * -1.0, a), 4096)
    r = on_element_grid(quotient, lowest, growth, ROUNDING, FIXED, TAPERED, False, 0, 0)
    e = overflow(r, size == INFINITY, largest, ROUNDING, SATURATES, TO_INFINITY)
    if OUT == FP32:
        y = with_sign(e * scale, bits, True)
        if not SIGNED_ZERO:
            y = tl.where(e == 0, 0.0, y)
    else:
        if not SIGNED_ZERO:
            e = with_sign(e, bits, True)  # the sums below make zeros positive
        y = product(e, m, 32768 if OUT == BF16 else 4096) * back
        if TO_INFINITY:
            y = tl.where(tl.abs(e) == float("inf"), e * scale, y)
        if SIGNED_ZERO:
            y = with_sign(y, bits, True)
    return narrow(bits_of(y), OUT)


@triton.jit
def _scaled_wide(
    bits, scale, OUT: tl.constexpr, ROUNDING: tl.constexpr, SYMMETRIC: tl.constexpr,
    TAPERED: tl.constexpr, SATURATES: tl.constexpr, TO_INFINITY: tl.constexpr,
    SIGNED_ZERO: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr,
    LARGEST: tl.constexpr, LARGEST_NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Cast in float64, for grids beyond float32's."""
    size = bits & MAGNITUDE
    scale = scale.to(tl.float64)
    a = number(size).to(tl.float64) / scale
    bound = bound_of(bits < 0, LARGEST, LARGEST_NEGATIVE, SYMMETRIC, SATURATES)
    r = on_element_grid(
        tl.minimum(a, bound), 0.0, 0.0, ROUNDING, False, TAPERED, True, MANTISSA, LOWEST
    )
    e = overflow(r, a == float("inf"), LARGEST, ROUNDING, SATURATES, TO_INFINITY)
    y = e * scale
    sign = bits & SIGN
    if not SIGNED_ZERO:
        sign = tl.where(e == 0, 0, sign)
    bad = (size > INFINITY) | (y != y)
    finite_result = round_once(tl.where(bad, 0.0, y), tl.where(bad, 0, sign), OUT)
    return tl.where(bad, narrow(tl.full(bits.shape, NAN, tl.int32), OUT), finite_result)


@triton.jit
def exact(
    bits, scale, f, m, inverse, back, lowest, growth, largest, largest_negative, OUT: tl.constexpr,
    ROUNDING: tl.constexpr, FIXED: tl.constexpr, SYMMETRIC: tl.constexpr, TAPERED: tl.constexpr,
    SATURATES: tl.constexpr, TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr,
    WIDE: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr,
):  # fmt: skip
    if WIDE:
        return _scaled_wide(
            bits, scale, OUT, ROUNDING, SYMMETRIC, TAPERED, SATURATES, TO_INFINITY, SIGNED_ZERO,
            MANTISSA, LOWEST, LARGEST, LARGEST_NEGATIVE,
        )  # fmt: skip
    else:
        return _scaled(
            bits, scale, f, m, inverse, back, lowest, growth, largest, largest_negative, OUT,
            ROUNDING, FIXED, SYMMETRIC, TAPERED, SATURATES, TO_INFINITY, SIGNED_ZERO,
        )  # fmt: skip


@triton.jit
def load_scale(
    scales, at, exists, largest, SOURCE: tl.constexpr, INF_SATURATES: tl.constexpr
):  # fmt: skip
    """Return given scales, or those of largest magnitudes."""
    if SOURCE == GIVEN:
        return tl.load(scales + at, mask=exists, other=1.0)
    else:
        return scale_of(tl.load(scales + at, mask=exists, other=0), largest, INF_SATURATES)


@triton.jit
def nudge_of(
    scale, SEVERAL: tl.constexpr, TIES: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr,
    ROUNDING: tl.constexpr,
):  # fmt: skip
    """Return the factor that takes quotients of scales to their side of ties, 0 if none does.

    `quick` computes q = |x| / scale with an error below 2**-22.9, and takes 21 leading bits of it.
    All that decides how q rounds are the ties of the grid (its values, to ROUNDING zero): numbers
    J * 2**k with an odd J < 2 * TIES. Here each J is tried. The products t = J * scale are exact,
    in two parts. Numbers x of 8 or 11 bits can come near t, within 2**-20 of it, only where t's
    leading bits do, as those of other x are 2**-12 away or more. Three cases:

    - x is above t: its quotients are to round up. After the factor 1 + 2**-22 they do: what was on
      the tie leaves it, and the next number of 21 bits, 2**-21 away, does not reach it.
    - x is below t: likewise, with 1 - 2**-22.
    - x equals t: 21 leading bits are the tie itself, and the factor 1 keeps it.

    A scale in whose group only one of them occurs needs no remainder. Powers of two change nothing,
    so one J stands for all exponents. Scales that were made from the largest of numbers of 8 bits
    have one case only: the quotients by the unrounded scale are ties or 2**-16 away, and its
    rounding moves them all to the same side.

    Results J * scale for bf16 are rounded to float32 first. That goes wrong only if the first
    rounding makes a tie of the second one, which is tried too.
    """
    j = (tl.arange(0, TIES) * 2 + 1).to(tl.float32)
    s = scale
    if SEVERAL:
        j = j[:, None]
        s = scale[None, :]
    t = j * s
    remainder = tl.fma(j, s, t * -1.0)
    x = leading(t, 65536 if KIND == BF16 else 8192)
    above = (x - t) - remainder
    near = tl.abs(above) <= t * 9.5367431640625e-07
    if ROUNDING == ZERO:
        near = near & (j < TIES)
    up = near & (above > 0)
    equal = near & (above == 0)
    if ROUNDING != EVEN:
        up = up | equal
    down = near & (above < 0)
    if OUT == BF16:
        twice = ((bits_of(t) & 0xFFFF) == 0x8000) & (remainder != 0) & (j < TIES)
        up = up | twice
        down = down | twice
    count = tl.where(up, 1, 0) + tl.where(down, 1 << 10, 0)
    if ROUNDING == EVEN:
        count += tl.where(equal, 1 << 20, 0)
    count = tl.sum(count, 0)
    ups, downs, ties = count & 1023, (count >> 10) & 1023, count >> 20
    nudge = tl.where(ups > 0, 1.0 + 2.0**-22, tl.where(downs > 0, 1.0 - 2.0**-22, 1.0))
    several = (ups > 0).to(tl.int32) + (downs > 0).to(tl.int32)
    if ROUNDING == EVEN:
        several += (ties > 0).to(tl.int32)
    usual = (scale >= 2.0**-60) & (scale <= 2.0**60) & (several <= 1)
    return tl.where(usual, nudge, 0.0)


@triton.jit
def quick(
    bits, scale, m, back, inverse, nudge, lowest, growth, largest, largest_negative,
    OWN_SCALE: tl.constexpr, OUT: tl.constexpr, ROUNDING: tl.constexpr, FIXED: tl.constexpr,
    SYMMETRIC: tl.constexpr, TAPERED: tl.constexpr, SATURATES: tl.constexpr,
    TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    """Cast in float32 with the factor of `nudge_of`: a quotient, an element, a product.

    No number of a group exceeds the largest one by more than the rounding of its own scale.
    """
    NEAREST: tl.constexpr = ZERO if ROUNDING == ZERO else EVEN
    SIGNED: tl.constexpr = FIXED and SATURATES and not SIGNED_ZERO and ROUNDING != ZERO
    x = number(bits)
    if not SIGNED:
        x = tl.abs(x)
    a = x * inverse
    if not OWN_SCALE:
        # A little above the largest number, which rounding to zero takes to it, too.
        if SIGNED:
            a = at_most(a, largest * 1.0009765625)
            a = at_most(a * -1.0, largest_negative * 1.0009765625) * -1.0
        else:
            bound = bound_of(bits < 0, largest, largest_negative, SYMMETRIC, SATURATES)
            a = at_most(a, bound * 1.0009765625)
    quotient = leading(a, 8) * nudge
    if SIGNED:
        magic = lowest * growth * 1.5
        e = (quotient + magic) - magic
    else:
        if TAPERED and ROUNDING == AWAY:
            e = tapered(quotient, EVEN)  # no quotient is a tie here
        else:
            e = on_element_grid(quotient, lowest, growth, NEAREST, FIXED, TAPERED, False, 0, 0)
        e = overflow(e, x == float("inf"), largest, ROUNDING, SATURATES, TO_INFINITY)
    if OUT == FP16:
        if not SIGNED:
            e = with_sign(e, bits, SIGNED_ZERO)
        y = product(e, m, 4096) * back
        if TO_INFINITY:
            y = tl.where(tl.abs(e) == float("inf"), e, y)
        if SIGNED_ZERO:
            y = with_sign(y, bits, True)
    else:
        y = e * scale
        if not SIGNED:
            # An exclusive or, as a compiler would do the same operation after both ways, alone.
            y = number(bits_of(y) ^ (bits & SIGN))
            if not SIGNED_ZERO:
                y += 0.0
    return narrow(bits_of(y), OUT)
