"""Casts of single numbers, without a scale or with a scale that many of them share."""

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
    narrow,
    number,
    round_once,
    round_to_step,
    tile,
    upright_tile,
    widen,
)


@triton.jit
def _tapered(exponent):
    """Return HiF8's mantissa bits: three near one, none below 2**-15."""
    far = tl.abs(exponent)
    bits = tl.where(far < 4, 3, tl.where(far < 8, 2, 1))
    return tl.where(exponent < -15, 0, bits)


@triton.jit
def _on_grid(
    a, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, ROUNDING: tl.constexpr,
    TAPERED: tl.constexpr,
):  # fmt: skip
    """Round magnitudes to the element's grid, in their own float type."""
    field = exponent_of(a, LOWEST)
    if TAPERED:
        WIDE: tl.constexpr = a.dtype == tl.float64
        exponent = (field >> 52) - 1023 if WIDE else (field >> 23) - 127
        r = round_to_step(a, field, _tapered(exponent).to(field.dtype), ROUNDING)
    else:
        r = round_to_step(a, field, MANTISSA, ROUNDING)
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
    """Round magnitudes to the element's values; overflow becomes the largest, Inf or NaN."""
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
    """Cast without a scale; WIDE computes in float64, for formats with float32's range."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    bits = widen(tl.load(x + at, mask=at < n, other=0), KIND)
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
    tl.store(out + at, narrow(signed, OUT), mask=at < n)


@triton.jit
def _scaled(
    bits, scale, OUT: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr,
    LARGEST: tl.constexpr, LARGEST_NEGATIVE: tl.constexpr, ROUNDING: tl.constexpr,
    TAPERED: tl.constexpr, SATURATES: tl.constexpr, TO_INFINITY: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    """Cast in float64, as the definition: a quotient, an element, a product, rounded once."""
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
    finite_result = round_once(tl.where(bad, 0.0, y), tl.where(bad, 0, sign), OUT)
    return tl.where(bad, narrow(tl.full(bits.shape, NAN, tl.int32), OUT), finite_result)


@triton.jit
def cast_rows(
    x, out, scales, length, groups, count, BLOCK: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TAIL: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr, ROUNDING: tl.constexpr, TAPERED: tl.constexpr,
    SATURATES: tl.constexpr, TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    """Cast with a scale for each block along the last axis."""
    at, exists = tile(length, groups, count, BLOCK, PADDED, ROWS, TAIL)
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    scale = tl.load(scales + group, mask=group < count, other=1.0)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    y = _scaled(
        bits, scale, OUT, MANTISSA, LOWEST, LARGEST, LARGEST_NEGATIVE, ROUNDING, TAPERED,
        SATURATES, TO_INFINITY, SIGNED_ZERO,
    )  # fmt: skip
    tl.store(out + at, y, mask=exists)


@triton.jit
def cast_long_rows(
    x, out, scales, length, TILE: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr, ROUNDING: tl.constexpr, TAPERED: tl.constexpr,
    SATURATES: tl.constexpr, TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    """Cast with a scale for each row of any length: the whole tensor, or leading channels."""
    pieces = tl.cdiv(length, TILE)
    program = tl.program_id(0).to(tl.int64)
    row = program // pieces
    within = (program - row * pieces) * TILE + tl.arange(0, TILE)
    at = row * length + within
    bits = widen(tl.load(x + at, mask=within < length, other=0), KIND)
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
    """Cast with a scale for each block along another axis, or with SHARED for each column."""
    at, exists = upright_tile(length, groups, inner, BLOCK, PADDED, COLUMNS)
    chunks = tl.cdiv(inner, COLUMNS)
    row = tl.program_id(0).to(tl.int64) // chunks
    column = (tl.program_id(0) % chunks) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if SHARED:
        row = row // groups
    scale = tl.load(scales + row * inner + column, mask=column < inner, other=1.0)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    y = _scaled(
        bits, scale, OUT, MANTISSA, LOWEST, LARGEST, LARGEST_NEGATIVE, ROUNDING, TAPERED,
        SATURATES, TO_INFINITY, SIGNED_ZERO,
    )  # fmt: skip
    tl.store(out + at, y, mask=exists)
