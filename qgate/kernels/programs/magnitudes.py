"""Programs that find the largest magnitude of rows and of columns, as bits of float32."""

import triton
import triton.language as tl

from qgate.kernels.programs.grid import BF16, FP32, INFINITY, MAGNITUDE, parts, widen


@triton.jit
def larger(most, raw, KIND: tl.constexpr, FINITE: tl.constexpr):
    """Compare magnitudes in the bits of their dtype, which have the numbers' order."""
    if KIND == FP32:
        size = raw & MAGNITUDE
        INFINITE: tl.constexpr = INFINITY
    else:
        size = raw.to(tl.int32) & 0x7FFF
        INFINITE: tl.constexpr = 0x7F80 if KIND == BF16 else 0x7C00
    if FINITE:
        size = tl.where(size < INFINITE, size, 0)
    return tl.maximum(most, size)


@triton.jit
def as_single(most, KIND: tl.constexpr):
    return most if KIND == FP32 else widen(most.to(tl.int16), KIND)


@triton.jit
def largest_rows(
    x, amax, length, TILE: tl.constexpr, TILES: tl.constexpr, KIND: tl.constexpr,
    FINITE: tl.constexpr,
):  # fmt: skip
    """Find the largest (finite) magnitude of each row: TILES tiles and one atomic a program.

    With FINITE, what has a NaN or an Inf is read again without them.
    """
    row, piece = parts(tl.cdiv(length, TILE * TILES))
    within = piece.to(tl.int64) * (TILE * TILES) + tl.arange(0, TILE)
    start = x + row.to(tl.int64) * length
    most = tl.zeros([TILE], tl.int32)
    for i in tl.static_range(TILES):
        raw = tl.load(start + within + i * TILE, mask=within + i * TILE < length, other=0)
        most = larger(most, raw, KIND, False)
    size = as_single(tl.max(most, 0), KIND)
    if FINITE:  # noqa: SIM102
        if size >= INFINITY:
            most = tl.zeros([TILE], tl.int32)
            for _ in range(TILES):
                raw = tl.load(start + within, mask=within < length, other=0)
                most = larger(most, raw, KIND, True)
                within += TILE
            size = as_single(tl.max(most, 0), KIND)
    tl.atomic_max(amax + row, size, sem="relaxed")


@triton.jit
def largest_columns(
    x, amax, length, inner, HIGH: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Find the largest magnitude of each column of an [outer, length, inner] tensor."""
    row, chunk = parts(tl.cdiv(inner, COLUMNS))
    pieces = tl.cdiv(length, HIGH * TILES).to(tl.int32)
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    within = (row % pieces).to(tl.int64) * (HIGH * TILES) + tl.arange(0, HIGH)[:, None]
    outer = (row // pieces).to(tl.int64)
    most = tl.zeros([HIGH, COLUMNS], tl.int32)
    for _ in tl.static_range(TILES):
        at = (outer * length + within) * inner + column[None, :]
        raw = tl.load(x + at, mask=(within < length) & (column[None, :] < inner), other=0)
        most = larger(most, raw, KIND, False)
        within += HIGH
    size = as_single(tl.max(most, 0), KIND)
    tl.atomic_max(amax + outer * inner + column, size, mask=column < inner, sem="relaxed")
