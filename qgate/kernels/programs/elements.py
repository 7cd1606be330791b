"""Casts of single numbers, without a scale or with a scale that many of them share."""

import triton
import triton.language as tl

from qgate.kernels.programs.grid import (
    FP16,
    MAGNITUDE,
    bits_of,
    narrow,
    number,
    parts,
    upright_tile,
    widen,
)
from qgate.kernels.programs.rounding import (
    at_most,
    bound_of,
    on_element_grid,
    overflow,
    with_sign,
)
from qgate.kernels.programs.scaled import (
    GIVEN,
    OWN,
    exact,
    load_scale,
    nudge_of,
    parts_of,
    quick,
    scale_of,
)


@triton.jit
def cast_flat(
    x, out, n, lowest, growth, largest, largest_negative, TILE: tl.constexpr,
    KIND: tl.constexpr, OUT: tl.constexpr, ROUNDING: tl.constexpr, FIXED: tl.constexpr,
    SYMMETRIC: tl.constexpr, TAPERED: tl.constexpr, SATURATES: tl.constexpr,
    TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr, WIDE: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Cast without a scale; WIDE computes in float64, for formats with float32's range."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    bits = widen(tl.load(x + at, mask=at < n, other=0), KIND)
    a = number(bits & MAGNITUDE)
    if WIDE:
        a = a.to(tl.float64)
        bound = bound_of(bits < 0, LARGEST, LARGEST_NEGATIVE, SYMMETRIC, SATURATES)
        most: tl.constexpr = LARGEST
    else:
        bound = bound_of(bits < 0, largest, largest_negative, SYMMETRIC, SATURATES)
        most = largest
    r = on_element_grid(
        at_most(a, bound), lowest, growth, ROUNDING, FIXED, TAPERED, WIDE, MANTISSA, LOWEST
    )
    e = overflow(r, a == float("inf"), most, ROUNDING, SATURATES, TO_INFINITY).to(tl.float32)
    tl.store(out + at, narrow(bits_of(with_sign(e, bits, SIGNED_ZERO)), OUT), mask=at < n)


@triton.jit
def plan_groups(
    scales, plans, count, largest, GROUPS: tl.constexpr, SOURCE: tl.constexpr,
    INF_SATURATES: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr, ROUNDING: tl.constexpr,
    TIES: tl.constexpr,
):  # fmt: skip
    """Write the scale of each group, its inverse, and the factor of `nudge_of`."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    exists = group < count
    scale = load_scale(scales, group, exists, largest, SOURCE, INF_SATURATES)
    f, _, inverse, _ = parts_of(scale, False)
    nudge = nudge_of(scale, True, TIES, KIND, OUT, ROUNDING)
    tl.store(plans + group, scale, mask=exists)
    tl.store(plans + count + group, inverse * f, mask=exists)
    tl.store(plans + count * 2 + group, nudge, mask=exists)


@triton.jit
def cast_rows(
    x, out, scales, length, groups, count, block, lowest, growth, largest, largest_negative,
    PADDED: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr, SOURCE: tl.constexpr,
    INF_SATURATES: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr, ROUNDING: tl.constexpr,
    FIXED: tl.constexpr, SYMMETRIC: tl.constexpr, TAPERED: tl.constexpr, SATURATES: tl.constexpr,
    TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr, WIDE: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr, TIES: tl.constexpr,
):  # fmt: skip
    """Cast with a scale for each block along the last axis: given, or with OWN made from it.

    With TIES it is one block, cast by `quick` if its scale allows it.
    """
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, PADDED)[None, :]
    exists = (group < count) & (k < block)
    if TAIL:
        row = group // groups
        within = (group - row * groups) * block + k
        at, exists = row * length + within, exists & (within < length)
    else:
        at = group * block + k
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    if TIES > 0:
        if SOURCE == OWN:
            amax = tl.max(tl.max(bits & MAGNITUDE, 1), 0)
            scale = scale_of(amax, largest, INF_SATURATES)
        else:
            scale = load_scale(scales, tl.program_id(0), True, largest, SOURCE, INF_SATURATES)
        f, m, inverse, back = parts_of(scale, WIDE)
        nudge = nudge_of(scale, False, TIES, KIND, OUT, ROUNDING)
        if nudge > 0:
            y = quick(
                bits, scale, m, back, inverse * f, nudge, lowest, growth, largest, largest_negative,
                SOURCE != GIVEN, OUT, ROUNDING, FIXED, SYMMETRIC, TAPERED, SATURATES, TO_INFINITY,
                SIGNED_ZERO,
            )  # fmt: skip
        else:
            y = exact(
                bits, scale, f, m, inverse, back,
                lowest, growth, largest, largest_negative, OUT, ROUNDING, FIXED, SYMMETRIC, TAPERED,
                SATURATES, TO_INFINITY, SIGNED_ZERO, WIDE, MANTISSA, LOWEST, LARGEST,
                LARGEST_NEGATIVE,
            )  # fmt: skip
    else:
        if SOURCE == OWN:
            scale = scale_of(tl.max(bits & MAGNITUDE, 1, keep_dims=True), largest, INF_SATURATES)
        else:
            scale = load_scale(scales, group, group < count, largest, SOURCE, INF_SATURATES)
        f, m, inverse, back = parts_of(scale, WIDE)
        y = exact(
            bits, scale, f, m, inverse, back,
            lowest, growth, largest, largest_negative, OUT, ROUNDING, FIXED, SYMMETRIC, TAPERED,
            SATURATES, TO_INFINITY, SIGNED_ZERO, WIDE, MANTISSA, LOWEST, LARGEST, LARGEST_NEGATIVE,
        )  # fmt: skip
    tl.store(out + at, y, mask=exists)


@triton.jit
def cast_long_rows(
    x, out, scales, length, lowest, growth, largest, largest_negative, TILE: tl.constexpr,
    SOURCE: tl.constexpr, INF_SATURATES: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr,
    ROUNDING: tl.constexpr,
    FIXED: tl.constexpr, SYMMETRIC: tl.constexpr, TAPERED: tl.constexpr, SATURATES: tl.constexpr,
    TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr, WIDE: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr, TIES: tl.constexpr,
):  # fmt: skip
    """Cast with a scale for each row of any length: the whole tensor, or leading channels.

    With TIES each program tries them itself, which saves a launch.
    """
    row, piece = parts(tl.cdiv(length, TILE))
    within = piece.to(tl.int64) * TILE + tl.arange(0, TILE)
    at = row.to(tl.int64) * length + within
    bits = widen(tl.load(x + at, mask=within < length, other=0), KIND)
    if TIES > 0:
        scale = load_scale(scales, row, True, largest, SOURCE, INF_SATURATES)
        f, m, inverse, back = parts_of(scale, WIDE)
        nudge = nudge_of(scale, False, TIES, KIND, OUT, ROUNDING)
        if nudge > 0:
            y = quick(
                bits, scale, m, back, inverse * f, nudge, lowest, growth, largest, largest_negative,
                SOURCE != GIVEN, OUT, ROUNDING, FIXED, SYMMETRIC, TAPERED, SATURATES, TO_INFINITY,
                SIGNED_ZERO,
            )  # fmt: skip
        else:
            y = exact(
                bits, scale, f, m, inverse, back,
                lowest, growth, largest, largest_negative, OUT, ROUNDING, FIXED, SYMMETRIC, TAPERED,
                SATURATES, TO_INFINITY, SIGNED_ZERO, WIDE, MANTISSA, LOWEST, LARGEST,
                LARGEST_NEGATIVE,
            )  # fmt: skip
    else:
        scale = load_scale(scales, row, True, largest, SOURCE, INF_SATURATES)
        f, m, inverse, back = parts_of(scale, WIDE)
        y = exact(
            bits, scale, f, m, inverse, back,
            lowest, growth, largest, largest_negative, OUT, ROUNDING, FIXED, SYMMETRIC, TAPERED,
            SATURATES, TO_INFINITY, SIGNED_ZERO, WIDE, MANTISSA, LOWEST, LARGEST, LARGEST_NEGATIVE,
        )  # fmt: skip
    tl.store(out + at, y, mask=within < length)


@triton.jit
def cast_columns(
    x, out, scales, length, groups, inner, block, lowest, growth, largest, largest_negative,
    SHARED: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr, SOURCE: tl.constexpr,
    INF_SATURATES: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr, ROUNDING: tl.constexpr,
    FIXED: tl.constexpr, SYMMETRIC: tl.constexpr, TAPERED: tl.constexpr, SATURATES: tl.constexpr,
    TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr, WIDE: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Cast with a scale for each block along another axis."""
    at, exists = upright_tile(length, groups, inner, block, PADDED, COLUMNS)
    bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
    row, chunk = parts(tl.cdiv(inner, COLUMNS))
    if SHARED:
        row = row // groups
    if SOURCE == OWN:
        scale = scale_of(tl.max(bits & MAGNITUDE, 0), largest, INF_SATURATES)
    else:
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)
        offset = row.to(tl.int64) * inner + column
        scale = load_scale(scales, offset, column < inner, largest, SOURCE, INF_SATURATES)
    f, m, inverse, back = parts_of(scale, WIDE)
    y = exact(
        bits, scale[None, :], f[None, :], m[None, :], inverse[None, :], back[None, :],
        lowest, growth, largest, largest_negative, OUT, ROUNDING, FIXED, SYMMETRIC, TAPERED,
        SATURATES, TO_INFINITY, SIGNED_ZERO, WIDE, MANTISSA, LOWEST, LARGEST, LARGEST_NEGATIVE,
    )  # fmt: skip
    tl.store(out + at, y, mask=exists)


@triton.jit
def cast_tall(
    x, out, plans, length, inner, count, lowest, growth, largest, largest_negative,
    HIGH: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, SOURCE: tl.constexpr,
    KIND: tl.constexpr, OUT: tl.constexpr, ROUNDING: tl.constexpr,
    FIXED: tl.constexpr, SYMMETRIC: tl.constexpr, TAPERED: tl.constexpr, SATURATES: tl.constexpr,
    TO_INFINITY: tl.constexpr, SIGNED_ZERO: tl.constexpr, WIDE: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Cast with a scale for each column of an [outer, length, inner] tensor, TILES tiles each.

    `plans` are those of `plan_groups`. A tile is cast by `quick` if all its columns allow it.
    """
    row, chunk = parts(tl.cdiv(inner, COLUMNS))
    pieces = tl.cdiv(length, HIGH * TILES).to(tl.int32)
    outer = (row // pieces).to(tl.int64)
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < inner
    offset = outer * inner + column
    scale = tl.load(plans + offset, mask=inside, other=1.0)
    by = tl.load(plans + count + offset, mask=inside, other=1.0)
    nudge = tl.load(plans + count * 2 + offset, mask=inside, other=1.0)
    usual = tl.min(tl.min(nudge, 1), 0) > 0
    # As wide as a tile before the loop, so that nothing moves between threads in it.
    scale = tl.broadcast_to(scale, [HIGH, COLUMNS])
    by = tl.broadcast_to(by, [HIGH, COLUMNS])
    nudge = tl.broadcast_to(nudge, [HIGH, COLUMNS])
    within = (row % pieces).to(tl.int64) * (HIGH * TILES) + tl.arange(0, HIGH)[:, None]
    at = (outer * length + within) * inner + column
    for _ in range(TILES):
        exists = (within < length) & inside
        bits = widen(tl.load(x + at, mask=exists, other=0), KIND)
        f, m, inverse, back = parts_of(scale, True)
        if usual:
            if OUT == FP16:
                f, m, inverse, back = parts_of(scale, WIDE)
            y = quick(
                bits, scale, m, back, by, nudge, lowest, growth, largest, largest_negative,
                SOURCE != GIVEN, OUT, ROUNDING, FIXED, SYMMETRIC, TAPERED, SATURATES, TO_INFINITY,
                SIGNED_ZERO,
            )  # fmt: skip
        else:
            f, m, inverse, back = parts_of(scale, WIDE)
            y = exact(
                bits, scale, f, m, inverse, back,
                lowest, growth, largest, largest_negative, OUT, ROUNDING, FIXED, SYMMETRIC, TAPERED,
                SATURATES, TO_INFINITY, SIGNED_ZERO, WIDE, MANTISSA, LOWEST, LARGEST,
                LARGEST_NEGATIVE,
            )  # fmt: skip
        tl.store(out + at, y, mask=exists)
        within += HIGH
        at += inner * HIGH
