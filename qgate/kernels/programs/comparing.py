"""Sums, extremes and counts over pairs of numbers: partial results, a column for each tile."""

import triton
import triton.language as tl

from qgate.kernels.programs.grid import INFINITY, MAGNITUDE, SIGN, number, widen


@triton.jit
def _total(x, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """Add neighbors first: each reduction is one addition, so that no layout changes the order."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (WIDTH >> (level + 1), 2)), 1)
    return tl.sum(x, 0)


@triton.jit
def _count(x):
    return tl.sum(x.to(tl.int32), 0)


@triton.jit
def _key(size, SHIFT: tl.constexpr):
    return (size.to(tl.int64, bitcast=True) >> SHIFT).to(tl.int32)


@triton.jit
def _pairs(actual, reference, at, n, KIND_A: tl.constexpr, KIND_R: tl.constexpr):
    """Load the bits of both, and tell which pairs exist and are finite."""
    bits_a = widen(tl.load(actual + at, mask=at < n, other=0), KIND_A)
    bits_r = widen(tl.load(reference + at, mask=at < n, other=0), KIND_R)
    larger = tl.maximum(bits_a & MAGNITUDE, bits_r & MAGNITUDE)
    return bits_a, bits_r, (at < n) & (larger < INFINITY)


@triton.jit
def _kinds(bits, exists, counts, tiles):
    """Count NaN, Inf and -Inf."""
    tl.atomic_add(counts, _count(exists & ((bits & MAGNITUDE) > INFINITY)), sem="relaxed")
    tl.atomic_add(counts + tiles, _count(exists & (bits == INFINITY)), sem="relaxed")
    tl.atomic_add(counts + 2 * tiles, _count(exists & (bits == (INFINITY | SIGN))), sem="relaxed")


@triton.jit
def compare_pairs(
    actual, reference, sums, extremes, counts, tables, n, tiles, keys, spread,
    TILE: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr, SHIFT: tl.constexpr,
    KIND_A: tl.constexpr, KIND_R: tl.constexpr,
):  # fmt: skip
    """Fill the columns of `comparing`; `counts` and `tables` have to be zero.

    The second pass over a tile, for sums about its means, reads the cache. `tables` get the keys of
    the differences, except for zero's. The key of the tile's first pair is counted in registers,
    because many equal differences would wait for each other at one address.
    """
    tile = tl.program_id(0)
    begin = tile.to(tl.int64) * TILE
    sum_a = tl.zeros((WIDTH,), tl.float64)
    sum_r = tl.zeros((WIDTH,), tl.float64)
    finite = tl.zeros((WIDTH,), tl.int32)
    for start in tl.range(0, TILE, WIDTH, loop_unroll_factor=4):
        at = begin + start + tl.arange(0, WIDTH)
        bits_a, bits_r, good = _pairs(actual, reference, at, n, KIND_A, KIND_R)
        sum_a += tl.where(good, number(bits_a), 0.0).to(tl.float64)
        sum_r += tl.where(good, number(bits_r), 0.0).to(tl.float64)
        finite += good.to(tl.int32)
    whole_a, whole_r = _total(sum_a, WIDTH, LEVELS), _total(sum_r, WIDTH, LEVELS)
    pairs = tl.sum(finite, 0)
    divisor = tl.maximum(pairs, 1).to(tl.float64)
    mean_a, mean_r = whole_a / divisor, whole_r / divisor

    first_a, first_r, usable = _pairs(actual, reference, begin, n, KIND_A, KIND_R)
    first_a = tl.where(usable, number(first_a), 0.0)
    first_r = tl.where(usable, number(first_r), 0.0)
    top = _key(tl.abs(first_a.to(tl.float64) - first_r.to(tl.float64)), SHIFT)
    table = tables + (tile % spread).to(tl.int64) * keys

    rest_a = tl.zeros((WIDTH,), tl.float64)
    rest_r = tl.zeros((WIDTH,), tl.float64)
    m2_a = tl.zeros((WIDTH,), tl.float64)
    m2_r = tl.zeros((WIDTH,), tl.float64)
    co = tl.zeros((WIDTH,), tl.float64)
    squares = tl.zeros((WIDTH,), tl.float64)
    abs_error = tl.zeros((WIDTH,), tl.float64)
    sum_error = tl.zeros((WIDTH,), tl.float64)
    abs_reference = tl.zeros((WIDTH,), tl.float64)
    largest = tl.zeros((WIDTH,), tl.float64)
    least_a = tl.full((WIDTH,), float("inf"), tl.float32)
    least_r = tl.full((WIDTH,), float("inf"), tl.float32)
    most_a = tl.full((WIDTH,), -float("inf"), tl.float32)
    most_r = tl.full((WIDTH,), -float("inf"), tl.float32)
    flips = tl.zeros((WIDTH,), tl.int32)
    alike = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, TILE, WIDTH):
        at = begin + start + tl.arange(0, WIDTH)
        bits_a, bits_r, good = _pairs(actual, reference, at, n, KIND_A, KIND_R)
        near_a = tl.where(good, number(bits_a), 0.0)
        near_r = tl.where(good, number(bits_r), 0.0)
        a, r = near_a.to(tl.float64), near_r.to(tl.float64)
        error = a - r
        size = tl.abs(error)
        off_a = tl.where(good, a - mean_a, 0.0)
        off_r = tl.where(good, r - mean_r, 0.0)
        rest_a += off_a
        rest_r += off_r
        m2_a += off_a * off_a
        m2_r += off_r * off_r
        co += off_a * off_r
        squares += error * error
        abs_error += size
        sum_error += error
        abs_reference += tl.abs(r)
        largest = tl.maximum(largest, size)
        least_a = tl.minimum(least_a, tl.where(good, near_a, float("inf")))
        least_r = tl.minimum(least_r, tl.where(good, near_r, float("inf")))
        most_a = tl.maximum(most_a, tl.where(good, near_a, -float("inf")))
        most_r = tl.maximum(most_r, tl.where(good, near_r, -float("inf")))
        flips += (((bits_a ^ bits_r) < 0) & (near_a != 0) & (near_r != 0)).to(tl.int32)
        key = _key(size, SHIFT)
        alike += (key == top).to(tl.int32)
        tl.atomic_add(table + key, 1, mask=(key != top) & (key != 0), sem="relaxed")

    into = sums + tile
    tl.store(into, whole_a)
    tl.store(into + tiles, whole_r)
    tl.store(into + 2 * tiles, _total(rest_a, WIDTH, LEVELS))
    tl.store(into + 3 * tiles, _total(rest_r, WIDTH, LEVELS))
    tl.store(into + 4 * tiles, _total(m2_a, WIDTH, LEVELS))
    tl.store(into + 5 * tiles, _total(m2_r, WIDTH, LEVELS))
    tl.store(into + 6 * tiles, _total(co, WIDTH, LEVELS))
    tl.store(into + 7 * tiles, _total(squares, WIDTH, LEVELS))
    tl.store(into + 8 * tiles, _total(abs_error, WIDTH, LEVELS))
    tl.store(into + 9 * tiles, _total(sum_error, WIDTH, LEVELS))
    tl.store(into + 10 * tiles, _total(abs_reference, WIDTH, LEVELS))
    into = extremes + tile
    tl.store(into, tl.max(largest, 0))
    tl.store(into + tiles, tl.min(least_a, 0).to(tl.float64))
    tl.store(into + 2 * tiles, tl.max(most_a, 0).to(tl.float64))
    tl.store(into + 3 * tiles, tl.min(least_r, 0).to(tl.float64))
    tl.store(into + 4 * tiles, tl.max(most_r, 0).to(tl.float64))
    into = counts + tile
    tl.store(into, pairs)
    tl.store(into + tiles, tl.sum(flips, 0))
    tl.atomic_add(table + top, tl.sum(alike, 0), mask=top != 0, sem="relaxed")

    if pairs < tl.minimum(n - begin, TILE):
        for start in range(0, TILE, WIDTH):
            at = begin + start + tl.arange(0, WIDTH)
            bits_a, bits_r, good = _pairs(actual, reference, at, n, KIND_A, KIND_R)
            _kinds(bits_a, at < n, into + 2 * tiles, tiles)
            _kinds(bits_r, at < n, into + 5 * tiles, tiles)
            smaller = tl.minimum(bits_a & MAGNITUDE, bits_r & MAGNITUDE)
            agreed = (smaller > INFINITY) | ((bits_a == bits_r) & (smaller == INFINITY))
            differ = (at < n) & (good == 0) & (agreed == 0)
            tl.atomic_add(into + 8 * tiles, _count(differ), sem="relaxed")
