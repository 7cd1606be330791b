"""MX: a power of two per block, all in units of it."""

import triton
import triton.language as tl

from qgate.kernels.programs.grid import (
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    bits_of,
    columns_of,
    narrow,
    number,
    round_to,
    rows_of,
    store_row,
    tile,
    upright_tile,
    widen,
)
from qgate.kernels.programs.magnitudes import as_single, larger


@triton.jit
def _scales(amax, highest, carry, limit, INF_SATURATES: tl.constexpr):
    """Return 1 / scale and the scale of blocks; that of a bad one is NaN, as its products are."""
    # A subnormal shows its exponent after a product with 2**32.
    tiny = amax < 0x00800000
    raised = bits_of(number(amax) * 4294967296.0)
    field = (tl.where(tiny, raised, amax) + carry) >> 23
    exponent = field - highest - tl.where(tiny, 159, 127)
    infinite = amax == INFINITY
    bad = amax > INFINITY
    if not INF_SATURATES:
        bad = bad | infinite
    bad = bad | ((exponent > limit) & (limit < 127) & (amax < INFINITY))
    exponent = tl.where(infinite, limit, tl.minimum(tl.maximum(exponent, -limit), limit))
    inverse = number(tl.where(exponent == 127, 0x00400000, (127 - exponent) << 23))
    power = tl.where(exponent == -127, 0x00400000, (127 + exponent) << 23)
    return inverse, number(tl.where(bad, NAN, power))


@triton.jit
def _elements(
    bits, inverse, scale, lowest, growth, largest, FIXED: tl.constexpr, ROUNDING: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    a = tl.minimum(number(bits & MAGNITUDE) * inverse, largest)
    y = round_to(a, lowest, growth, ROUNDING, FIXED) * scale
    signed = bits_of(y) | (bits & SIGN)
    if not SIGNED_ZERO:
        signed = bits_of(number(signed) + 0.0)
    return signed


@triton.jit
def _quantized(
    bits, lowest, growth, largest, highest, carry, limit, AXIS: tl.constexpr, FIXED: tl.constexpr,
    ROUNDING: tl.constexpr, SIGNED_ZERO: tl.constexpr, INF_SATURATES: tl.constexpr,
):  # fmt: skip
    amax = tl.max(bits & MAGNITUDE, AXIS, keep_dims=True)
    inverse, scale = _scales(amax, highest, carry, limit, INF_SATURATES)
    return _elements(bits, inverse, scale, lowest, growth, largest, FIXED, ROUNDING, SIGNED_ZERO)


@triton.jit(do_not_specialize=["highest", "carry", "limit"])
def quantize_rows(
    x, out, length, groups, count, lowest, growth, largest, highest, carry, limit,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr,
    KIND: tl.constexpr, OUT: tl.constexpr, FIXED: tl.constexpr, ROUNDING: tl.constexpr,
    SIGNED_ZERO: tl.constexpr, INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Blocks along the last axis."""
    at, exists = tile(length, groups, count, BLOCK, PADDED, ROWS, TAIL)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    y = _quantized(
        bits, lowest, growth, largest, highest, carry, limit, 1, FIXED, ROUNDING, SIGNED_ZERO,
        INF_SATURATES,
    )  # fmt: skip
    tl.store(out + at, narrow(y, OUT), mask=exists)


@triton.jit(do_not_specialize=["highest", "carry", "limit"])
def quantize_columns(
    x, out, length, groups, inner, lowest, growth, largest, highest, carry, limit,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr,
    OUT: tl.constexpr, FIXED: tl.constexpr, ROUNDING: tl.constexpr, SIGNED_ZERO: tl.constexpr,
    INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Long blocks along another axis."""
    at, exists = upright_tile(length, groups, inner, BLOCK, PADDED, COLUMNS)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    y = _quantized(
        bits, lowest, growth, largest, highest, carry, limit, 0, FIXED, ROUNDING, SIGNED_ZERO,
        INF_SATURATES,
    )  # fmt: skip
    tl.store(out + at, narrow(y, OUT), mask=exists)


@triton.jit(do_not_specialize=["highest", "carry", "limit"])
def quantize_short_columns(
    x, out, length, groups, inner, lowest, growth, largest, highest, carry, limit,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr,
    FIXED: tl.constexpr, ROUNDING: tl.constexpr, SIGNED_ZERO: tl.constexpr,
    INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Blocks along another axis that fit the registers of a thread."""
    start, column, high = columns_of(length, groups, inner, BLOCK, COLUMNS)
    rows = rows_of(x, start, column, high, inner, BLOCK)
    most = tl.zeros([COLUMNS], tl.int32)
    for i in tl.static_range(BLOCK):
        most = larger(most, rows[i], KIND, False)
    inverse, scale = _scales(as_single(most, KIND), highest, carry, limit, INF_SATURATES)
    for i in tl.static_range(BLOCK):
        y = _elements(
            widen(rows[i], KIND), inverse, scale, lowest, growth, largest, FIXED, ROUNDING,
            SIGNED_ZERO,
        )  # fmt: skip
        store_row(out, narrow(y, OUT), i, start, column, high, inner)
