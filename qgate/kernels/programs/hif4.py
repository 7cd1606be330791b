"""HiF4: one scale for 64 elements, and for each eight and four of them a doubling or none."""

import triton
import triton.language as tl

from qgate.kernels.programs.grid import (
    EVEN,
    FP32,
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    bits_of,
    narrow,
    number,
    on_grid,
    widen,
)


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
    seventh = tl.minimum(number(amax).to(tl.float64) * 0.142578125, 65536.0)
    unrounded = tl.maximum(on_grid(seventh, 7, -126, EVEN), 2.0**-48)
    scale = on_grid(tl.minimum(unrounded, 49152.0), 2, -48, EVEN)
    inverse = on_grid(1.0 / scale, 7, -126, EVEN)
    if KIND == FP32:
        by = inverse
        a, fine, coarse = number(size).to(tl.float64), number(quads), number(octets)
        fine, coarse = fine.to(tl.float64), coarse.to(tl.float64)
    else:
        # Eleven bits times eight are exact in float32.
        by = inverse.to(tl.float32)
        a, fine, coarse = number(size), number(quads), number(octets)
    e8 = coarse * by >= 4.0
    e16 = fine * by >= tl.where(e8, 4.0, 2.0)
    doublings = e8.to(tl.int32) + e16.to(tl.int32)
    scaled = tl.minimum(a * (by * number((127 - doublings) << 23)), 1.75)
    e = on_grid(scaled, 2, 0, ROUNDING).to(tl.float32)
    y = e * (scale.to(tl.float32) * number((127 + doublings) << 23))
    return tl.where(bad, NAN, bits_of(y) | (bits & SIGN))


@triton.jit
def quantize_rows(
    x, out, length, groups, count, ROWS: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr,
    ROUNDING: tl.constexpr, INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Blocks along the last axis."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None, None]
    octet = tl.arange(0, 8)[None, :, None, None] * 8
    half = tl.arange(0, 2)[None, None, :, None] * 4
    k = octet + half + tl.arange(0, 4)[None, None, None, :]
    row = group // groups
    within = (group - row * groups) * 64 + k
    at = row * length + within
    exists = (group < count) & (within < length)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    y = _quantized(bits, 1, KIND, ROUNDING, INF_SATURATES)
    tl.store(out + at, narrow(y, OUT), mask=exists)


@triton.jit
def quantize_columns(
    x, out, length, groups, inner, COLUMNS: tl.constexpr, KIND: tl.constexpr,
    OUT: tl.constexpr, ROUNDING: tl.constexpr, INF_SATURATES: tl.constexpr,
):  # fmt: skip
    """Blocks along another axis."""
    chunks = tl.cdiv(inner, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    row = program // chunks
    column = (program - row * chunks) * COLUMNS + tl.arange(0, COLUMNS)[None, None, None, :]
    outer = row // groups
    octet = tl.arange(0, 8)[:, None, None, None] * 8
    half = tl.arange(0, 2)[None, :, None, None] * 4
    k = octet + half + tl.arange(0, 4)[None, None, :, None]
    within = (row - outer * groups) * 64 + k
    at = (outer * length + within) * inner + column
    exists = (within < length) & (column < inner)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    y = _quantized(bits, 0, KIND, ROUNDING, INF_SATURATES)
    tl.store(out + at, narrow(y, OUT), mask=exists)
