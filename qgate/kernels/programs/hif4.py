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
    narrow,
    number,
    parts,
    product,
    round_to,
    tile,
    widen,
)

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
def _quantized(
    bits, AXIS: tl.constexpr, KIND: tl.constexpr, ROUNDING: tl.constexpr,
    INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Quantize octets, their halves and the four elements of each along AXIS and the next two."""
    size = bits & MAGNITUDE
    quads = tl.max(size, AXIS + 2, keep_dims=True)
    octets = tl.max(quads, AXIS + 1, keep_dims=True)
    amax = tl.max(octets, AXIS, keep_dims=True)
    bad = amax > INFINITY if INF_SATURATES else amax >= INFINITY
    if KIND == FP32:
        # Numbers from 2**20 on saturate; their products could overflow.
        size, quads = tl.minimum(size, 147 << 23), tl.minimum(quads, 147 << 23)
        octets, amax = tl.minimum(octets, 147 << 23), tl.minimum(amax, 147 << 23)
    # What is subnormal here is below the smallest scale.
    seventh = tl.minimum(_times(number(amax), 0.142578125, KIND), 65536.0)
    unrounded = tl.maximum(
        round_to(seventh, 1.1754943508222875e-38, 65536.0, EVEN, False), SMALLEST
    )
    scale = round_to(tl.minimum(unrounded, 49152.0), SMALLEST, 2097152.0, EVEN, False)
    by = _inverse_of(scale)
    e8 = _times(number(octets), by, KIND) >= 4.0
    e16 = _times(number(quads), by, KIND) >= tl.where(e8, 4.0, 2.0)
    doublings = (e8.to(tl.int32) + e16.to(tl.int32)) << 23
    scaled = _times(number(size), by * number((127 << 23) - doublings), KIND)
    e = round_to(tl.minimum(scaled, 1.75), 1.0, 2097152.0, ROUNDING, True)
    y = e * (tl.where(bad, float("nan"), scale) * number((127 << 23) + doublings))
    return bits_of(y) | (bits & SIGN)


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
def quantize_columns(
    x, out, length, groups, inner, COLUMNS: tl.constexpr, KIND: tl.constexpr,
    OUT: tl.constexpr, ROUNDING: tl.constexpr, INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Blocks along another axis."""
    row, chunk = parts(tl.cdiv(inner, COLUMNS))
    outer, group = row // groups, row % groups
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, None, None, :]
    octet = tl.arange(0, 8)[:, None, None, None] * 8
    half = tl.arange(0, 2)[None, :, None, None] * 4
    k = octet + half + tl.arange(0, 4)[None, None, :, None]
    within = group.to(tl.int64) * 64 + k
    at = (outer.to(tl.int64) * length + within) * inner + column
    exists = (within < length) & (column < inner)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    y = _quantized(bits, 0, KIND, ROUNDING, INF_SATURATES)
    tl.store(out + at, narrow(y, OUT), mask=exists)
