"""Casts of single numbers, without a scale or with a scale that many of them share."""

import triton
import triton.language as tl

from qgate.kernels.programs.grid import (
    BF16,
    EVEN,
    FP32,
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    ZERO,
    beside,
    bits_of,
    exponent_of,
    leading,
    narrow,
    number,
    parts,
    product,
    round_once,
    round_to,
    round_to_step,
    side,
    upright_tile,
    widen,
)

GIVEN = tl.constexpr(0)
AMAX = tl.constexpr(1)
OWN = tl.constexpr(2)


@triton.jit
def _tapered_wide(a, ROUNDING: tl.constexpr):
    """Round float64 magnitudes to HiF8's mantissa bits: three near one, none below 2**-15."""
    field = exponent_of(a, -22)
    exponent = (field >> 52) - 1023
    far = tl.abs(exponent)
    bits = tl.where(far < 4, 3, tl.where(far < 8, 2, 1))
    return round_to_step(a, field, tl.where(exponent < -15, 0, bits).to(field.dtype), ROUNDING)


@triton.jit
def _tapered(a, ROUNDING: tl.constexpr):
    """Do the same in float32."""
    field = tl.maximum(bits_of(a) & INFINITY, 105 << 23)
    far = tl.maximum(field, (254 << 23) - field)
    growth = tl.where(
        far < (131 << 23), 1048576.0, tl.where(far < (135 << 23), 2097152.0, 4194304.0)
    )
    growth = tl.where(field < (112 << 23), 8388608.0, growth)
    return round_to(a, number(field), growth, ROUNDING, True)


@triton.jit
def _on_grid(
    a, lowest, growth, ROUNDING: tl.constexpr, FIXED: tl.constexpr, TAPERED: tl.constexpr,
    WIDE: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Round magnitudes to the element's grid: with WIDE, by constants, in float64."""
    if TAPERED:
        r = _tapered_wide(a, ROUNDING) if WIDE else _tapered(a, ROUNDING)
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
def _bound(negative, largest, largest_negative, SYMMETRIC: tl.constexpr, SATURATES: tl.constexpr):
    """Return what no magnitude has to exceed to have the same result."""
    if not SATURATES:
        return 4.0 * largest
    elif SYMMETRIC:
        return largest
    else:
        return tl.where(negative, largest_negative, largest)


@triton.jit
def _at_most(a, bound):
    """Return the smaller number, NaN of a NaN."""
    return tl.minimum(a, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _overflow(
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
def _with_sign(e, bits, SIGNED_ZERO: tl.constexpr):
    """Return float32 magnitudes with the sign of other numbers."""
    signed = number(bits_of(e) | (bits & SIGN))
    return signed if SIGNED_ZERO else signed + 0.0


@triton.jit
def cast_flat(
    x, out, n, lowest, growth, largest, largest_negative, TILE: tl.constexpr,
    KIND: tl.constexpr, OUT: tl.constexpr, ROUNDING: tl.constexpr, FIXED: tl.constexpr,
    SYMMETRIC: tl.constexpr, TAPERED: tl.constexpr, SATURATES: tl.constexpr,
    TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr, WIDE: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Cast without a scale; WIDE computes in float64, for formats with float32's range."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    bits = widen(tl.load(x + at, mask=at < n, other=0), KIND)
    a = number(bits & MAGNITUDE)
    if WIDE:
        a = a.to(tl.float64)
        bound = _bound(bits < 0, LARGEST, LARGEST_NEGATIVE, SYMMETRIC, SATURATES)
        most: tl.constexpr = LARGEST
    else:
        bound = _bound(bits < 0, largest, largest_negative, SYMMETRIC, SATURATES)
        most = largest
    r = _on_grid(
        _at_most(a, bound), lowest, growth, ROUNDING, FIXED, TAPERED, WIDE, MANTISSA, LOWEST
    )
    e = _overflow(r, a == float("inf"), most, ROUNDING, SATURATES, TO_INFINITY).to(tl.float32)
    tl.store(out + at, narrow(bits_of(_with_sign(e, bits, SIGNED_ZERO)), OUT), mask=at < n)


@triton.jit
def _scale_of(amax, largest, INF_SATURATES: tl.constexpr):
    """Return amax / largest, 1 for zeros, NaN where there is one or an Inf that does not saturate.

    Rounded once: a quotient of 24 and of at most 12 bits is on no tie of float32 unless exactly, so
    float64 between gives the same.
    """
    quotient = tl.div_rn(number(tl.minimum(amax, 0x7F7FFFFF)), largest)
    scale = tl.where(amax == 0, 0x3F800000, tl.maximum(bits_of(quotient), 1))
    spoilt = amax > INFINITY if INF_SATURATES else amax >= INFINITY
    return number(tl.where(spoilt, NAN, scale))


@triton.jit
def _parts_of(scale, WIDE: tl.constexpr):
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
    bound = _bound(bits < 0, largest, largest_negative, SYMMETRIC, SATURATES)
    a = _at_most(number(size) * f, bound * m * 1.0000002384185791)
    if FIXED:
        # The ties of equal steps are multiples of half a step.
        magic = lowest * growth * 0.25
        near = (a * inverse + magic) - magic
        rest = tl.fma(near, m * -1.0, a)
        quotient = tl.fma(side(rest), magic * 5.960464477539063e-08, near)
    else:
        near = leading(a * inverse, 4096)
        quotient = beside(near, tl.fma(near, m * -1.0, a), 4096)
    r = _on_grid(quotient, lowest, growth, ROUNDING, FIXED, TAPERED, False, 0, 0)
    e = _overflow(r, size == INFINITY, largest, ROUNDING, SATURATES, TO_INFINITY)
    if OUT == FP32:
        y = _with_sign(e * scale, bits, True)
        if not SIGNED_ZERO:
            y = tl.where(e == 0, 0.0, y)
    else:
        if not SIGNED_ZERO:
            e = _with_sign(e, bits, True)  # the sums below make zeros positive
        y = product(e, m, 32768 if OUT == BF16 else 4096) * back
        if TO_INFINITY:
            y = tl.where(tl.abs(e) == float("inf"), e * scale, y)
        if SIGNED_ZERO:
            y = _with_sign(y, bits, True)
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
    bound = _bound(bits < 0, LARGEST, LARGEST_NEGATIVE, SYMMETRIC, SATURATES)
    r = _on_grid(tl.minimum(a, bound), 0.0, 0.0, ROUNDING, False, TAPERED, True, MANTISSA, LOWEST)
    e = _overflow(r, a == float("inf"), LARGEST, ROUNDING, SATURATES, TO_INFINITY)
    y = e * scale
    sign = bits & SIGN
    if not SIGNED_ZERO:
        sign = tl.where(e == 0, 0, sign)
    bad = (size > INFINITY) | (y != y)
    finite_result = round_once(tl.where(bad, 0.0, y), tl.where(bad, 0, sign), OUT)
    return tl.where(bad, narrow(tl.full(bits.shape, NAN, tl.int32), OUT), finite_result)


@triton.jit
def _cast(
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
def _load_scale(
    scales, at, exists, largest, SOURCE: tl.constexpr, INF_SATURATES: tl.constexpr
):  # fmt: skip
    """Return given scales, or those of largest magnitudes."""
    if SOURCE == GIVEN:
        return tl.load(scales + at, mask=exists, other=1.0)
    else:
        return _scale_of(tl.load(scales + at, mask=exists, other=0), largest, INF_SATURATES)


@triton.jit
def cast_rows(
    x, out, scales, length, groups, count, block, lowest, growth, largest, largest_negative,
    PADDED: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr, SOURCE: tl.constexpr,
    INF_SATURATES: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr, ROUNDING: tl.constexpr,
    FIXED: tl.constexpr, SYMMETRIC: tl.constexpr, TAPERED: tl.constexpr, SATURATES: tl.constexpr,
    TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr, WIDE: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Cast with a scale for each block along the last axis: given, or with OWN made from it."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, PADDED)[None, :]
    exists = (group < count) & (k < block)
    if TAIL:
        row = group // groups
        within = (group - row * groups) * block + k
        at, exists = row * length + within, exists & (within < length)
    else:
        at = group * block + k
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    if SOURCE == OWN:
        scale = _scale_of(tl.max(bits & MAGNITUDE, 1, keep_dims=True), largest, INF_SATURATES)
    else:
        scale = _load_scale(scales, group, group < count, largest, SOURCE, INF_SATURATES)
    f, m, inverse, back = _parts_of(scale, WIDE)
    y = _cast(
        bits, scale, f, m, inverse, back, lowest, growth, largest, largest_negative, OUT, ROUNDING,
        FIXED, SYMMETRIC, TAPERED, SATURATES, TO_INFINITY, SIGNED_ZERO, WIDE, MANTISSA, LOWEST,
        LARGEST, LARGEST_NEGATIVE,
    )  # fmt: skip
    tl.store(out + at, y, mask=exists)


@triton.jit
def cast_long_rows(
    x, out, scales, length, lowest, growth, largest, largest_negative, TILE: tl.constexpr,
    SOURCE: tl.constexpr, INF_SATURATES: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr,
    ROUNDING: tl.constexpr, FIXED: tl.constexpr, SYMMETRIC: tl.constexpr, TAPERED: tl.constexpr,
    SATURATES: tl.constexpr, TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr,
    WIDE: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Cast with a scale for each row of any length: the whole tensor, or leading channels."""
    row, piece = parts(tl.cdiv(length, TILE))
    within = piece.to(tl.int64) * TILE + tl.arange(0, TILE)
    at = row.to(tl.int64) * length + within
    bits = widen(tl.load(x + at, mask=within < length, other=0), KIND)
    scale = _load_scale(scales, row, True, largest, SOURCE, INF_SATURATES)
    f, m, inverse, back = _parts_of(scale, WIDE)
    y = _cast(
        bits, scale, f, m, inverse, back, lowest, growth, largest, largest_negative, OUT, ROUNDING,
        FIXED, SYMMETRIC, TAPERED, SATURATES, TO_INFINITY, SIGNED_ZERO, WIDE, MANTISSA, LOWEST,
        LARGEST, LARGEST_NEGATIVE,
    )  # fmt: skip
    tl.store(out + at, y, mask=within < length)


@triton.jit
def cast_columns(
    x, out, scales, length, groups, inner, block, lowest, growth, largest, largest_negative,
    SHARED: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr, SOURCE: tl.constexpr,
    INF_SATURATES: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr, ROUNDING: tl.constexpr,
    FIXED: tl.constexpr, SYMMETRIC: tl.constexpr, TAPERED: tl.constexpr, SATURATES: tl.constexpr,
    TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr, WIDE: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Cast with a scale for each block along another axis, or with SHARED for each column."""
    at, exists = upright_tile(length, groups, inner, block, PADDED, COLUMNS)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    row, chunk = parts(tl.cdiv(inner, COLUMNS))
    if SHARED:
        row = row // groups
    if SOURCE == OWN:
        scale = _scale_of(tl.max(bits & MAGNITUDE, 0), largest, INF_SATURATES)
    else:
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)
        place = row.to(tl.int64) * inner + column
        scale = _load_scale(scales, place, column < inner, largest, SOURCE, INF_SATURATES)
    f, m, inverse, back = _parts_of(scale, WIDE)
    scale, f, m, inverse, back = (
        scale[None, :], f[None, :], m[None, :], inverse[None, :], back[None, :]
    )  # fmt: skip
    y = _cast(
        bits, scale, f, m, inverse, back, lowest, growth, largest, largest_negative, OUT, ROUNDING,
        FIXED, SYMMETRIC, TAPERED, SATURATES, TO_INFINITY, SIGNED_ZERO, WIDE, MANTISSA, LOWEST,
        LARGEST, LARGEST_NEGATIVE,
    )  # fmt: skip
    tl.store(out + at, y, mask=exists)
