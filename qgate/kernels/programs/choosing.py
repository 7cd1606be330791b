"""NVFP4 whose blocks each take the better of two grids, as `formats.choosing` defines it.

The errors of a block are added one after the other, in float32; a result is made in float64.
"""

import triton
import triton.language as tl

from qgate.kernels.programs.grid import (
    EVEN,
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    narrow,
    number,
    on_grid,
    round_once,
    tile,
    upright_tile,
    widen,
)
from qgate.kernels.programs.nvfp4 import LARGEST_FLOAT

_INTEGER = tl.constexpr(8388608.0)
"""A number whose ulp is 1."""


@triton.jit
def _elements(a, largest, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """Round magnitudes to a grid: to integers where MANTISSA is -1, to 0, 1, 2 and 4 where 0."""
    a = tl.minimum(a, largest)
    if MANTISSA < 0:
        return (a + _INTEGER) - _INTEGER
    elif MANTISSA == 0:  # ties go to even codes, which 0 and 2 have
        low = (tl.minimum(a, 2.0) + _INTEGER) - _INTEGER
        return tl.where(a > 3.0, 4.0, low)
    else:
        return on_grid(a, MANTISSA, LOWEST, EVEN)


@triton.jit
def _scales(amax, encode_scale, decode, divisor, factor):
    """Return the scales of blocks on one grid, and the factors of their numbers."""
    unrounded = tl.minimum(tl.div_rn(amax, divisor) * encode_scale * factor, 448.0)
    block_scale = on_grid(unrounded, 3, -6, EVEN)
    return block_scale, tl.minimum(tl.div_rn(1.0, block_scale * decode), LARGEST_FLOAT)


@triton.jit
def _sum_in_order(errors, k, AXIS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.sum(tl.where(k == 0, errors, 0.0), AXIS, keep_dims=True)
    for i in tl.static_range(1, BLOCK):
        total = total + tl.sum(tl.where(k == i, errors, 0.0), AXIS, keep_dims=True)
    return total


@triton.jit
def _errors(e, block_scale, tensor_amax, unit, bound, a, k, exists, AXIS: tl.constexpr,
            BLOCK: tl.constexpr, SQUARES: tl.constexpr):  # fmt: skip
    """Return the sum of each block's errors; elements and numbers are magnitudes of one sign."""
    decoded = tl.div_rn(e * block_scale * tensor_amax * unit, bound)
    errors = tl.abs(decoded - a)
    errors = errors * errors if SQUARES else errors
    return _sum_in_order(tl.where(exists, errors, 0.0), k, AXIS, BLOCK)


@triton.jit
def _quantized(
    bits, k, exists, tensor_amax, bound, largest, divisor, factor, unit, inverse_unit,
    second_largest, AXIS: tl.constexpr, BLOCK: tl.constexpr, MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr, SECOND_MANTISSA: tl.constexpr, SECOND_LOWEST: tl.constexpr,
    HAS_UNIT: tl.constexpr, ONE_ZERO: tl.constexpr, SQUARES: tl.constexpr,
    SECOND_WINS: tl.constexpr, OUT: tl.constexpr, INF_SATURATES: tl.constexpr,
):  # fmt: skip
    whole = tl.load(tensor_amax)
    encode_scale = tl.minimum(tl.div_rn(bound, number(whole)), LARGEST_FLOAT)
    encode_scale = tl.where(whole == 0, 1.0, encode_scale)
    of_tensor = tl.where(whole == 0, bound, number(whole))
    decode = tl.div_rn(1.0, encode_scale)
    most = tl.max(bits & MAGNITUDE, AXIS, keep_dims=True)
    bad = most > INFINITY if INF_SATURATES else most >= INFINITY
    amax, a = number(tl.where(bad, 0, most)), number(bits & MAGNITUDE)
    scale, encode = _scales(amax, encode_scale, decode, largest, 1.0)
    second_scale, second_encode = _scales(amax, encode_scale, decode, divisor, factor)
    ratios = a * second_encode
    if HAS_UNIT:
        ratios = ratios * inverse_unit
    e = _elements(a * encode, largest, MANTISSA, LOWEST)
    second_e = _elements(ratios, second_largest, SECOND_MANTISSA, SECOND_LOWEST)
    one = _errors(e, scale, of_tensor, 1.0, bound, a, k, exists, AXIS, BLOCK, SQUARES)
    two = _errors(
        second_e, second_scale, of_tensor, unit, bound, a, k, exists, AXIS, BLOCK, SQUARES
    )
    second = (two <= one) if SECOND_WINS else (two < one)
    exact = scale.to(tl.float64) * decode.to(tl.float64)
    if HAS_UNIT:
        second_exact = (second_scale * decode * unit).to(tl.float64)
    else:
        second_exact = second_scale.to(tl.float64) * decode.to(tl.float64)
    e, exact = tl.where(second, second_e, e), tl.where(second, second_exact, exact)
    sign = bits & SIGN
    if ONE_ZERO:
        sign = tl.where(second & (e == 0.0), 0, sign)
    y = round_once(e.to(tl.float64) * exact, sign, OUT)
    return tl.where(bad, narrow(tl.full(bits.shape, NAN, tl.int32), OUT), y)


@triton.jit
def quantize_rows(
    x, out, tensor_amax, length, groups, count, bound, largest, divisor, factor, unit, inverse_unit,
    second_largest, BLOCK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    TAIL: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr, MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr, SECOND_MANTISSA: tl.constexpr, SECOND_LOWEST: tl.constexpr,
    HAS_UNIT: tl.constexpr, ONE_ZERO: tl.constexpr, SQUARES: tl.constexpr,
    SECOND_WINS: tl.constexpr, INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Blocks along the last axis; `tensor_amax` is the tensor's largest finite magnitude."""
    at, exists = tile(length, groups, count, BLOCK, PADDED, ROWS, TAIL)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    k = tl.arange(0, PADDED)[None, :]
    y = _quantized(
        bits, k, exists, tensor_amax, bound, largest, divisor, factor, unit, inverse_unit,
        second_largest, 1, BLOCK, MANTISSA, LOWEST, SECOND_MANTISSA, SECOND_LOWEST, HAS_UNIT,
        ONE_ZERO, SQUARES, SECOND_WINS, OUT, INF_SATURATES,
    )  # fmt: skip
    tl.store(out + at, y, mask=exists)


@triton.jit
def quantize_columns(
    x, out, tensor_amax, length, groups, inner, bound, largest, divisor, factor, unit, inverse_unit,
    second_largest, BLOCK: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr,
    KIND: tl.constexpr, OUT: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr,
    SECOND_MANTISSA: tl.constexpr, SECOND_LOWEST: tl.constexpr, HAS_UNIT: tl.constexpr,
    ONE_ZERO: tl.constexpr, SQUARES: tl.constexpr, SECOND_WINS: tl.constexpr,
    INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Blocks along another axis."""
    at, exists = upright_tile(length, groups, inner, BLOCK, PADDED, COLUMNS)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    k = tl.arange(0, PADDED)[:, None]
    y = _quantized(
        bits, k, exists, tensor_amax, bound, largest, divisor, factor, unit, inverse_unit,
        second_largest, 0, BLOCK, MANTISSA, LOWEST, SECOND_MANTISSA, SECOND_LOWEST, HAS_UNIT,
        ONE_ZERO, SQUARES, SECOND_WINS, OUT, INF_SATURATES,
    )  # fmt: skip
    tl.store(out + at, y, mask=exists)
