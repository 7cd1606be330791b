"""Casts of single numbers: as they are, or by a scale that many of them share."""

import triton
import triton.language as tl

from qgate.kernels.programs.grid import (
    EVEN,
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    ZERO,
    bits_of,
    exponent_of,
    narrowed,
    number,
    rounded,
    stored,
    tile,
    upright_tile,
    widely_rounded,
    widened,
)


@triton.jit
def _tapered(exponent):
    """HiF8's mantissa bits: three near one, none below 2**-15."""
    far = tl.abs(exponent)
    bits = tl.where(far < 4, 3, tl.where(far < 8, 2, 1))
    return tl.where(exponent < -15, 0, bits)


@triton.jit
def _on_grid(
    a, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, ROUNDING: tl.constexpr,
    TAPERED: tl.constexpr,
):  # fmt: skip
    """Magnitudes to the element's grid, in the float type they come in."""
    WIDE: tl.constexpr = a.dtype == tl.float64
    if WIDE:
        field = tl.maximum(exponent_of(a), (LOWEST + 1023) << 52)
        if TAPERED:
            bits = _tapered((field >> 52) - 1023).to(tl.int64)
            r = widely_rounded(a, field, bits, ROUNDING)
        else:
            r = widely_rounded(a, field, MANTISSA, ROUNDING)
    else:
        field = tl.maximum(bits_of(a) & INFINITY, (LOWEST + 127) << 23)
        if TAPERED:
            r = rounded(a, field, _tapered((field >> 23) - 127), ROUNDING)
        else:
            r = rounded(a, field, MANTISSA, ROUNDING)
    if TAPERED and ROUNDING == EVEN:
        # Powers of two alternate between even and odd codes.
        r = tl.where(a == 1.5 * 2.0**-21, 2.0**-21, r)
        r = tl.where(a == 1.5 * 2.0**-19, 2.0**-19, r)
        r = tl.where(a == 1.5 * 2.0**-17, 2.0**-17, r)
    return r


@triton.jit
def _element(
    a, negative, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr, ROUNDING: tl.constexpr, TAPERED: tl.constexpr,
    SATURATES: tl.constexpr, TO_INFINITY: tl.constexpr,
):  # fmt: skip
    """Magnitudes to the element's; what overflows becomes the largest, Inf or NaN."""
    if SATURATES:
        if LARGEST == LARGEST_NEGATIVE:
            a = tl.minimum(a, LARGEST)
        else:
            a = tl.minimum(a, tl.where(negative, LARGEST_NEGATIVE, LARGEST).to(a.dtype))
        return _on_grid(a, MANTISSA, LOWEST, ROUNDING, TAPERED)
    else:
        infinite = a == float("inf")
        r = _on_grid(tl.minimum(a, 4.0 * LARGEST), MANTISSA, LOWEST, ROUNDING, TAPERED)
        over = r > LARGEST
        if ROUNDING == ZERO:
            r = tl.where(over, LARGEST, r)
            over = infinite
        if TO_INFINITY:
            return tl.where(over, float("inf"), r).to(a.dtype)
        else:
            return tl.where(over, float("nan"), r).to(a.dtype)


@triton.jit
def cast_flat(
    x, out, n, TILE: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr, ROUNDING: tl.constexpr, TAPERED: tl.constexpr,
    SATURATES: tl.constexpr, TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Numbers as they are; WIDE computes in float64, for formats with float32's range."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    bits = widened(tl.load(x + at, mask=at < n, other=0), KIND)
    size = bits & MAGNITUDE
    a = number(size)
    if WIDE:
        a = a.to(tl.float64)
    e = _element(
        a, bits < 0, MANTISSA, LOWEST, LARGEST, LARGEST_NEGATIVE, ROUNDING, TAPERED, SATURATES,
        TO_INFINITY,
    )  # fmt: skip
    y = bits_of(e.to(tl.float32))
    signed = y | (bits & SIGN)
    if not SIGNED_ZERO:
        signed = tl.where(y == 0, 0, signed)
    signed = tl.where((size > INFINITY) | (y > INFINITY), NAN, signed)
    tl.store(out + at, narrowed(signed, OUT), mask=at < n)


@triton.jit
def _scaled(
    bits, scale, OUT: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr,
    LARGEST: tl.constexpr, LARGEST_NEGATIVE: tl.constexpr, ROUNDING: tl.constexpr,
    TAPERED: tl.constexpr, SATURATES: tl.constexpr, TO_INFINITY: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    """In float64, as the definition: a quotient, an element, a product, rounded once."""
    size = bits & MAGNITUDE
    a = number(size).to(tl.float64) / scale
    e = _element(
        a, bits < 0, MANTISSA, LOWEST, LARGEST, LARGEST_NEGATIVE, ROUNDING, TAPERED, SATURATES,
        TO_INFINITY,
    )  # fmt: skip
    y = e * scale
    sign = bits & SIGN
    if not SIGNED_ZERO:
        sign = tl.where(e == 0, 0, sign)
    bad = (size > INFINITY) | (y != y)
    found = stored(tl.where(bad, 0.0, y), tl.where(bad, 0, sign), OUT)
    return tl.where(bad, narrowed(tl.full(bits.shape, NAN, tl.int32), OUT), found)


@triton.jit
def cast_rows(
    x, out, scales, length, groups, count, BLOCK: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TAIL: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr, ROUNDING: tl.constexpr, TAPERED: tl.constexpr,
    SATURATES: tl.constexpr, TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    """A scale for each block along the last axis."""
    at, there = tile(length, groups, count, BLOCK, PADDED, ROWS, TAIL)
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    scale = tl.load(scales + group, mask=group < count, other=1.0)
    bits = widened(tl.load(x + at, mask=there, other=0), KIND)
    y = _scaled(
        bits, scale, OUT, MANTISSA, LOWEST, LARGEST, LARGEST_NEGATIVE, ROUNDING, TAPERED,
        SATURATES, TO_INFINITY, SIGNED_ZERO,
    )  # fmt: skip
    tl.store(out + at, y, mask=there)


@triton.jit
def cast_long_rows(
    x, out, scales, length, TILE: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr, ROUNDING: tl.constexpr, TAPERED: tl.constexpr,
    SATURATES: tl.constexpr, TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    """A scale for each row, of any length: the whole tensor, or channels that come first."""
    pieces = tl.cdiv(length, TILE)
    place = tl.program_id(0).to(tl.int64)
    row = place // pieces
    within = (place - row * pieces) * TILE + tl.arange(0, TILE)
    at = row * length + within
    bits = widened(tl.load(x + at, mask=within < length, other=0), KIND)
    y = _scaled(
        bits, tl.load(scales + row), OUT, MANTISSA, LOWEST, LARGEST, LARGEST_NEGATIVE, ROUNDING,
        TAPERED, SATURATES, TO_INFINITY, SIGNED_ZERO,
    )  # fmt: skip
    tl.store(out + at, y, mask=within < length)


@triton.jit
def cast_columns(
    x, out, scales, length, groups, inner, SHARED: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr, ROUNDING: tl.constexpr, TAPERED: tl.constexpr,
    SATURATES: tl.constexpr, TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    """A scale for each block along another axis, or with SHARED one for each place after it."""
    at, there = upright_tile(length, groups, inner, BLOCK, PADDED, COLUMNS)
    chunks = tl.cdiv(inner, COLUMNS)
    row = tl.program_id(0).to(tl.int64) // chunks
    column = (tl.program_id(0) % chunks) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if SHARED:
        row = row // groups
    scale = tl.load(scales + row * inner + column, mask=column < inner, other=1.0)
    bits = widened(tl.load(x + at, mask=there, other=0), KIND)
    y = _scaled(
        bits, scale, OUT, MANTISSA, LOWEST, LARGEST, LARGEST_NEGATIVE, ROUNDING, TAPERED,
        SATURATES, TO_INFINITY, SIGNED_ZERO,
    )  # fmt: skip
    tl.store(out + at, y, mask=there)
