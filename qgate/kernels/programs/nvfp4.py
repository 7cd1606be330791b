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
    narrow,
    number,
    on_grid,
    product,
    round_once,
    round_to,
    tile,
    upright_tile,
    widen,
)

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
def _quantized(
    bits, tensor_amax, AXIS: tl.constexpr, OUT: tl.constexpr, ROUNDING: tl.constexpr,
    INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Quantize blocks; the scales of a bad one are NaN, which its products are then too."""
    largest = tl.load(tensor_amax)
    encode_scale = tl.minimum(tl.div_rn(2688.0, number(largest)), LARGEST_FLOAT)
    encode_scale = tl.where(largest == 0, 1.0, encode_scale)
    decode = tl.div_rn(1.0, encode_scale)
    size = bits & MAGNITUDE
    amax = tl.max(size, AXIS, keep_dims=True)
    bad = amax > INFINITY if INF_SATURATES else amax >= INFINITY
    factor = encode_scale * 0.16666667163372040
    unrounded = tl.minimum(number(tl.where(bad, 0, amax)) * factor, 448.0)
    block_scale = on_grid(unrounded, 3, -6, EVEN)
    encode = tl.minimum(tl.div_rn(1.0, block_scale * decode), LARGEST_FLOAT)
    e = round_to(tl.minimum(number(size) * encode, 6.0), 1.0, 4194304.0, ROUNDING, False)
    sign = bits & SIGN
    spoilt = tl.where(bad, float("nan"), block_scale)
    if _rounds_once(decode, OUT):
        if OUT == FP16:
            code = bits_of(e)
            one = product(spoilt, decode, 4096)
            half_more = product(spoilt * 1.5, decode, 4096)
            # Zero, or the power of two of 0.5, 1 and 1.5, 2 and 3, 4 and 6.
            power = number(code & INFINITY)
            y = tl.where((code & 0x00400000) != 0, half_more, one) * power
        else:
            y = (e * spoilt) * decode
        y = narrow(bits_of(y) ^ sign, OUT)
    else:
        exact = block_scale.to(tl.float64) * decode.to(tl.float64)
        y = round_once(e.to(tl.float64) * exact, sign, OUT)
        y = tl.where(bad, narrow(tl.full(bits.shape, NAN, tl.int32), OUT), y)
    return y


@triton.jit
def quantize_rows(
    x, out, tensor_amax, length, groups, count, BLOCK: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TAIL: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr,
    ROUNDING: tl.constexpr, INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Blocks along the last axis; `tensor_amax` is the tensor's largest finite magnitude."""
    at, exists = tile(length, groups, count, BLOCK, PADDED, ROWS, TAIL)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    y = _quantized(bits, tensor_amax, 1, OUT, ROUNDING, INF_SATURATES)
    tl.store(out + at, y, mask=exists)


@triton.jit
def quantize_columns(
    x, out, tensor_amax, length, groups, inner, BLOCK: tl.constexpr, PADDED: tl.constexpr,
    COLUMNS: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr, ROUNDING: tl.constexpr,
    INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Blocks along another axis."""
    at, exists = upright_tile(length, groups, inner, BLOCK, PADDED, COLUMNS)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    y = _quantized(bits, tensor_amax, 0, OUT, ROUNDING, INF_SATURATES)
    tl.store(out + at, y, mask=exists)
