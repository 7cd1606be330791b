"""NVFP4: E2M1 elements, an E4M3 scale per block, one float32 scale for the tensor.

The steps are the format's, each one float32 operation. A result is the product of an element, its
block's scale and the tensor's, rounded once.
"""

import triton
import triton.language as tl

from qgate.kernels.programs.grid import (
    BF16,
    EVEN,
    FP16,
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    bits_of,
    columns_of,
    narrow,
    number,
    on_grid,
    product,
    round_once,
    round_to,
    rows_of,
    store_row,
    tile,
    upright_tile,
    widen,
)
from qgate.kernels.programs.magnitudes import as_single, larger

LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _rounds_once(decode, OUT: tl.constexpr):
    """Return whether products with the tensor's scale have the bits of one rounding.

    An element times a block's scale has 6 bits, an odd number up to 45 times a power of two, and
    is exact. What rounds to a tie of bf16 first is rounded twice, which all these numbers are tried
    for. The rest is far from subnormal numbers.
    """
    usual = (decode > 2.0**-80) & (decode < 2.0**80)
    if OUT == BF16:
        j = (tl.arange(0, 32) * 2 + 1).to(tl.float32)
        y = j * decode
        twice = ((bits_of(y) & 0xFFFF) == 0x8000) & (tl.fma(j, decode, y * -1.0) != 0) & (j < 46)
        usual = usual & (tl.max(twice.to(tl.int32), 0) == 0)
    return usual


@triton.jit
def _scale_of_tensor(tensor_amax, bound):
    """Return 1 / scale of the tensor, and the scale."""
    largest = tl.load(tensor_amax)
    encode_scale = tl.minimum(tl.div_rn(bound, number(largest)), LARGEST_FLOAT)
    encode_scale = tl.where(largest == 0, 1.0, encode_scale)
    return encode_scale, tl.div_rn(1.0, encode_scale)


@triton.jit
def _scales(amax, encode_scale, decode, largest, LOWEST: tl.constexpr, INF_SATURATES: tl.constexpr):
    """Return which blocks are bad, the scales of all, and the factors of their numbers."""
    bad = amax > INFINITY if INF_SATURATES else amax >= INFINITY
    factor = encode_scale * 0.16666667163372040
    unrounded = tl.minimum(number(tl.where(bad, 0, amax)) * factor, largest)
    block_scale = on_grid(unrounded, 3, LOWEST, EVEN)
    encode = tl.minimum(tl.div_rn(1.0, block_scale * decode), LARGEST_FLOAT)
    return bad, block_scale, encode


@triton.jit
def _elements(bits, encode, ROUNDING: tl.constexpr):
    a = tl.minimum(number(bits & MAGNITUDE) * encode, 6.0)
    return round_to(a, 1.0, 4194304.0, ROUNDING, False)


@triton.jit
def _quickly(bits, spoilt, encode, decode, OUT: tl.constexpr, ROUNDING: tl.constexpr):
    """Quantize where `_rounds_once`; `spoilt` is the block's scale, NaN for a bad one."""
    e = _elements(bits, encode, ROUNDING)
    if OUT == FP16:
        code = bits_of(e)
        one = product(spoilt, decode, 4096)
        half_more = product(spoilt * 1.5, decode, 4096)
        # Zero, or the power of two of 0.5, 1 and 1.5, 2 and 3, 4 and 6.
        power = number(code & INFINITY)
        y = tl.where((code & 0x00400000) != 0, half_more, one) * power
    else:
        y = (e * spoilt) * decode
    return narrow(bits_of(y) ^ (bits & SIGN), OUT)


@triton.jit
def _widely(
    bits, bad, block_scale, encode, decode, OUT: tl.constexpr, ROUNDING: tl.constexpr
):  # fmt: skip
    """Quantize in float64."""
    e = _elements(bits, encode, ROUNDING)
    exact = block_scale.to(tl.float64) * decode.to(tl.float64)
    y = round_once(e.to(tl.float64) * exact, bits & SIGN, OUT)
    return tl.where(bad, narrow(tl.full(bits.shape, NAN, tl.int32), OUT), y)


@triton.jit
def _quantized(
    bits, tensor_amax, bound, largest, AXIS: tl.constexpr, LOWEST: tl.constexpr,
    OUT: tl.constexpr, ROUNDING: tl.constexpr, INF_SATURATES: tl.constexpr,
):  # fmt: skip
    encode_scale, decode = _scale_of_tensor(tensor_amax, bound)
    amax = tl.max(bits & MAGNITUDE, AXIS, keep_dims=True)
    bad, block_scale, encode = _scales(amax, encode_scale, decode, largest, LOWEST, INF_SATURATES)
    if _rounds_once(decode, OUT):
        spoilt = tl.where(bad, float("nan"), block_scale)
        y = _quickly(bits, spoilt, encode, decode, OUT, ROUNDING)
    else:
        y = _widely(bits, bad, block_scale, encode, decode, OUT, ROUNDING)
    return y


@triton.jit
def quantize_rows(
    x, out, tensor_amax, length, groups, count, bound, largest, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr, KIND: tl.constexpr,
    OUT: tl.constexpr, LOWEST: tl.constexpr, ROUNDING: tl.constexpr, INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Blocks along the last axis; `tensor_amax` is the tensor's largest finite magnitude."""
    at, exists = tile(length, groups, count, BLOCK, PADDED, ROWS, TAIL)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    y = _quantized(bits, tensor_amax, bound, largest, 1, LOWEST, OUT, ROUNDING, INF_SATURATES)
    tl.store(out + at, y, mask=exists)


@triton.jit
def quantize_columns(
    x, out, tensor_amax, length, groups, inner, bound, largest, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr,
    LOWEST: tl.constexpr, ROUNDING: tl.constexpr, INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Long blocks along another axis."""
    at, exists = upright_tile(length, groups, inner, BLOCK, PADDED, COLUMNS)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    y = _quantized(bits, tensor_amax, bound, largest, 0, LOWEST, OUT, ROUNDING, INF_SATURATES)
    tl.store(out + at, y, mask=exists)


@triton.jit
def quantize_short_columns(
    x, out, tensor_amax, length, groups, inner, bound, largest, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr, LOWEST: tl.constexpr,
    ROUNDING: tl.constexpr, INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Blocks along another axis that fit the registers of a thread."""
    start, column, high = columns_of(length, groups, inner, BLOCK, COLUMNS)
    rows = rows_of(x, start, column, high, inner, BLOCK)
    encode_scale, decode = _scale_of_tensor(tensor_amax, bound)
    most = tl.zeros([COLUMNS], tl.int32)
    for i in tl.static_range(BLOCK):
        most = larger(most, rows[i], KIND, False)
    bad, block_scale, encode = _scales(
        as_single(most, KIND), encode_scale, decode, largest, LOWEST, INF_SATURATES
    )
    if _rounds_once(decode, OUT):
        spoilt = tl.where(bad, float("nan"), block_scale)
        for i in tl.static_range(BLOCK):
            y = _quickly(widen(rows[i], KIND), spoilt, encode, decode, OUT, ROUNDING)
            store_row(out, y, i, start, column, high, inner)
    else:
        for i in tl.static_range(BLOCK):
            y = _widely(widen(rows[i], KIND), bad, block_scale, encode, decode, OUT, ROUNDING)
            store_row(out, y, i, start, column, high, inner)
