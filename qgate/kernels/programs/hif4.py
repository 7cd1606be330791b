"""HiF4: one scale for 64 elements, and for each eight and four of them a doubling or none."""

import triton
import triton.language as tl

from qgate.kernels.programs.grid import (
    EVEN,
    FP32,
    INFINITY,
    MAGNITUDE,
    SIGN,
    bits_of,
    columns_of,
    narrow,
    number,
    product,
    round_to,
    rows_of,
    store_row,
    tile,
    widen,
)
from qgate.kernels.programs.magnitudes import as_single, larger

SMALLEST = tl.constexpr(2.0**-48)


@triton.jit
def _times(a, b, KIND: tl.constexpr):
    """Multiply by 8-bit numbers so that one rounding more, to 11 bits at most, is the only one.

    Eleven bits times eight are exact.
    """
    return product(a, b, 4096) if KIND == FP32 else a * b


@triton.jit
def _inverse_of(scale):
    """Return 1 / scale in bf16: of the four significands 1, 1.25, 1.5 and 1.75."""
    bits = bits_of(scale)
    code = bits & 0x00600000
    significand = tl.where(code == 0x00200000, 0x3F4D0000, 0x3F2B0000)
    significand = tl.where(code == 0x00600000, 0x3F120000, significand)
    significand = tl.where(code == 0, 0x3F800000, significand)
    return number(significand + (127 << 23) - (bits & INFINITY))


@triton.jit
def _bounded(size, KIND: tl.constexpr):
    """Return magnitudes of which none is above 2**20: they saturate, and products could overflow.

    Only float32 has products of numbers that large.
    """
    return tl.minimum(size, 147 << 23) if KIND == FP32 else size


@triton.jit
def _scale_of(amax, KIND: tl.constexpr, INF_SATURATES: tl.constexpr):
    """Return the scale of each 64, 1 / scale, and the scale with NaN for bad ones."""
    bad = amax > INFINITY if INF_SATURATES else amax >= INFINITY
    # What is subnormal here is below the smallest scale.
    seventh = tl.minimum(_times(number(_bounded(amax, KIND)), 0.142578125, KIND), 65536.0)
    unrounded = tl.maximum(
        round_to(seventh, 1.1754943508222875e-38, 65536.0, EVEN, False), SMALLEST
    )
    scale = round_to(tl.minimum(unrounded, 49152.0), SMALLEST, 2097152.0, EVEN, False)
    return _inverse_of(scale), tl.where(bad, float("nan"), scale)


@triton.jit
def _doubles(size, by, most, KIND: tl.constexpr):
    """Tell whether octets, or their halves, are so large that their step doubles."""
    return _times(number(_bounded(size, KIND)), by, KIND) >= most


@triton.jit
def _elements(
    bits, by, spoilt, doublings, KIND: tl.constexpr, ROUNDING: tl.constexpr
):  # fmt: skip
    size = _bounded(bits & MAGNITUDE, KIND)
    scaled = _times(number(size), by * number((127 << 23) - doublings), KIND)
    e = round_to(tl.minimum(scaled, 1.75), 1.0, 2097152.0, ROUNDING, True)
    y = e * (spoilt * number((127 << 23) + doublings))
    return bits_of(y) | (bits & SIGN)


@triton.jit
def _quantized(
    bits, AXIS: tl.constexpr, KIND: tl.constexpr, ROUNDING: tl.constexpr,
    INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Quantize octets, their halves and the four elements of each along AXIS and the next two."""
    quads = tl.max(bits & MAGNITUDE, AXIS + 2, keep_dims=True)
    octets = tl.max(quads, AXIS + 1, keep_dims=True)
    by, spoilt = _scale_of(tl.max(octets, AXIS, keep_dims=True), KIND, INF_SATURATES)
    e8 = _doubles(octets, by, 4.0, KIND)
    e16 = _doubles(quads, by, tl.where(e8, 4.0, 2.0), KIND)
    doublings = (e8.to(tl.int32) + e16.to(tl.int32)) << 23
    return _elements(bits, by, spoilt, doublings, KIND, ROUNDING)


@triton.jit
def quantize_rows(
    x, out, length, groups, count, ROWS: tl.constexpr, TAIL: tl.constexpr, KIND: tl.constexpr,
    OUT: tl.constexpr, ROUNDING: tl.constexpr, INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Blocks along the last axis, read and written as rows so that it is in whole vectors."""
    at, exists = tile(length, groups, count, 64, 64, ROWS, TAIL)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    y = _quantized(tl.reshape(bits, (ROWS, 8, 2, 4)), 1, KIND, ROUNDING, INF_SATURATES)
    tl.store(out + at, narrow(tl.reshape(y, (ROWS, 64)), OUT), mask=exists)


@triton.jit
def quantize_short_columns(
    x, out, length, groups, inner, COLUMNS: tl.constexpr, KIND: tl.constexpr,
    OUT: tl.constexpr, ROUNDING: tl.constexpr, INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Blocks along another axis, read twice: all in registers takes far longer to compile.

    The last numbers come first again, for caches have these.
    """
    start, column, high = columns_of(length, groups, inner, 64, COLUMNS)
    step = tl.cast(inner, tl.int64) * 8
    most = tl.zeros([COLUMNS], tl.int32)
    for part in range(2):
        rows = rows_of(x, start + step * (part * 4), column, high - part * 32, inner, 32)
        for i in tl.static_range(32):
            most = larger(most, rows[i], KIND, False)
    by, spoilt = _scale_of(as_single(most, KIND), KIND, INF_SATURATES)
    for turn in range(8):
        octet = 7 - turn
        first, left = start + step * octet, high - octet * 8
        rows = rows_of(x, first, column, left, inner, 8)
        low = tl.zeros([COLUMNS], tl.int32)
        upper = tl.zeros([COLUMNS], tl.int32)
        for i in tl.static_range(4):
            low = larger(low, rows[i], KIND, False)
            upper = larger(upper, rows[i + 4], KIND, False)
        e8 = _doubles(as_single(tl.maximum(low, upper), KIND), by, 4.0, KIND)
        for half in tl.static_range(2):
            quad = as_single(low if half == 0 else upper, KIND)
            e16 = _doubles(quad, by, tl.where(e8, 4.0, 2.0), KIND)
            doublings = (e8.to(tl.int32) + e16.to(tl.int32)) << 23
            for i in tl.static_range(4):
                bits = widen(rows[half * 4 + i], KIND)
                y = narrow(_elements(bits, by, spoilt, doublings, KIND, ROUNDING), OUT)
                store_row(out, y, half * 4 + i, first, column, left, inner)
