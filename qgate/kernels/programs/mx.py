"""MX: a power of two per block, all in units of it."""

import triton
import triton.language as tl

from qgate.kernels.programs.grid import (
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    bits_of,
    narrow,
    number,
    on_grid,
    tile,
    upright_tile,
    widen,
)


@triton.jit
def _quantized(
    bits, AXIS: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr, LARGEST: tl.constexpr, CARRY: tl.constexpr, LIMIT: tl.constexpr,
    ROUNDING: tl.constexpr, SIGNED_ZERO: tl.constexpr, INF_SATURATES: tl.constexpr,
):  # fmt: skip
    size = bits & MAGNITUDE
    amax = tl.max(size, AXIS, keep_dims=True)
    # A subnormal shows its exponent after a product with 2**32.
    tiny = amax < 0x00800000
    raised = bits_of(number(amax) * 4294967296.0)
    field = (tl.where(tiny, raised, amax) + CARRY) >> 23
    exponent = field - tl.where(tiny, 159 + HIGHEST, 127 + HIGHEST)
    infinite = amax == INFINITY
    bad = amax > INFINITY
    if not INF_SATURATES:
        bad = bad | infinite
    if LIMIT < 127:
        bad = bad | ((exponent > LIMIT) & (amax < INFINITY))
    exponent = tl.where(infinite, LIMIT, tl.minimum(tl.maximum(exponent, -LIMIT), LIMIT))
    inverse = number(tl.where(exponent == 127, 0x00400000, (127 - exponent) << 23))
    scale = number(tl.where(exponent == -127, 0x00400000, (127 + exponent) << 23))
    a = tl.minimum(number(size) * inverse, LARGEST)
    y = bits_of(on_grid(a, MANTISSA, LOWEST, ROUNDING) * scale)
    signed = y | (bits & SIGN)
    if not SIGNED_ZERO:
        signed = tl.where(y == 0, 0, signed)
    return tl.where(bad, NAN, signed)


@triton.jit
def quantize_rows(
    x, out, length, groups, count, BLOCK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    TAIL: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr, MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, LARGEST: tl.constexpr, CARRY: tl.constexpr,
    LIMIT: tl.constexpr, ROUNDING: tl.constexpr, SIGNED_ZERO: tl.constexpr,
    INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Blocks along the last axis."""
    at, exists = tile(length, groups, count, BLOCK, PADDED, ROWS, TAIL)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    y = _quantized(
        bits, 1, MANTISSA, LOWEST, HIGHEST, LARGEST, CARRY, LIMIT, ROUNDING, SIGNED_ZERO,
        INF_SATURATES,
    )  # fmt: skip
    tl.store(out + at, narrow(y, OUT), mask=exists)


@triton.jit
def quantize_columns(
    x, out, length, groups, inner, BLOCK: tl.constexpr, PADDED: tl.constexpr,
    COLUMNS: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr, MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, LARGEST: tl.constexpr, CARRY: tl.constexpr,
    LIMIT: tl.constexpr, ROUNDING: tl.constexpr, SIGNED_ZERO: tl.constexpr,
    INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Blocks along another axis."""
    at, exists = upright_tile(length, groups, inner, BLOCK, PADDED, COLUMNS)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    y = _quantized(
        bits, 0, MANTISSA, LOWEST, HIGHEST, LARGEST, CARRY, LIMIT, ROUNDING, SIGNED_ZERO,
        INF_SATURATES,
    )  # fmt: skip
    tl.store(out + at, narrow(y, OUT), mask=exists)
