"""The readable definition of every format: rounding by the list of values, in plain numpy.

The fast code has to agree with this file bit for bit, and the gate takes its ideal quantizers from
here, so that no code under test judges itself. Input and result are float64, exact for tensors of
at most 32 bits (and for float64 where scales are powers of two); cast the result once to the dtype
you need.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable

import numpy as np

from qgate.errors import QgateError
from qgate.formats._block import poisoned
from qgate.formats._element import ElementFormat
from qgate.formats.options import Floats, Rounding
from qgate.formats.settings import QuantizerSettings

CLEARLY_LESS = 1 - 2.0**-40
"""Factor for an error: a sum below the product is smaller in any order of additions."""


def round_by_list(
    x: Floats,
    fmt: ElementFormat,
    *,
    rounding: Rounding | None = None,
    saturate: bool = True,
    narrow: bool = True,
) -> Floats:
    """Round each number to one of the two values beside it in the format's list.

    It is the nearest one; of two equally near, the one at an even position in the list of
    magnitudes ("even") or the larger one ("away"); "zero" takes the one nearer zero. Beyond the
    largest value the list goes on with its last step, and a number rounded there has overflowed.
    """
    rounding = rounding or fmt.rounding
    if fmt.is_codebook:
        return _round_by_levels(x, fmt, rounding)
    low, high = fmt.bounds(narrow=narrow)
    places, middles = _places(fmt), _middles(fmt)
    unknown = np.isnan(x)
    size = np.where(unknown, 0.0, np.minimum(np.abs(x), places[-1]))
    # In a list that counts 0, 1, 2, … a magnitude is its own position.
    last = size.astype(np.intp) if _counts(fmt) else places.searchsorted(size, side="right") - 1
    below = np.minimum(last, len(places) - 2)
    middle = middles[below]
    if rounding == "even":
        up = (size > middle) | ((size == middle) & (below % 2 == 1))
    elif rounding == "away":
        up = size >= middle
    elif rounding == "zero":
        up = size == places[below + 1]
    else:
        raise QgateError("the definition of stochastic rounding is a probability, not a value.")
    y = np.copysign(places[below + up], x)
    if saturate or not (fmt.has_inf or fmt.nan_code is not None):
        y = np.clip(y, low, high)
    else:
        over = (y > high) | (y < low)
        if rounding == "zero":
            y = np.where(over & np.isfinite(x), np.clip(y, low, high), y)
            over &= ~np.isfinite(x)
        y = np.where(over, np.copysign(np.inf, x) if fmt.has_inf else np.nan, y)
        y = np.where(over & (x < 0), np.nan, y) if low == 0 else y
    if fmt.negative_zero is None:
        y = y + 0.0
    return np.where(unknown, np.nan, y)


def _round_by_levels(x: Floats, fmt: ElementFormat, rounding: Rounding) -> Floats:
    """Round to the levels of a codebook, one after the other from the lowest.

    The middle of two levels is rounded to float32, as bitsandbytes does. There, "even" takes the
    lower level, and "away" the larger one if one is. "zero" takes the smaller of the two beside a
    number, between mirrored ones the nearer.
    """
    if rounding == "stochastic":
        raise QgateError("the definition of stochastic rounding is a probability, not a value.")
    levels = fmt.sorted_values
    y = np.full(np.shape(x), levels[0])
    for low, high in itertools.pairwise(levels):
        middle = float(np.float32((low + high) / 2))
        grows = abs(high) > abs(low)
        if rounding == "zero" and abs(high) != abs(low):
            up = x >= high if grows else x > low
        elif rounding == "even":
            up = x > middle
        else:
            up = (x > middle) | ((x == middle) & grows)
        y = np.where(up, high, y)
    if fmt.negative_zero is not None:
        y = np.where(y == 0, np.copysign(0.0, x), y)
    return np.where(np.isnan(x), np.nan, y)


@functools.cache
def _places(fmt: ElementFormat) -> Floats:
    """List the magnitudes, and three more beyond the last."""
    listed = fmt.magnitudes()
    step = 2.0 ** (fmt.max_exponent - fmt.mantissa)
    return np.append(listed, listed[-1] + step * np.arange(1, 4))


@functools.cache
def _middles(fmt: ElementFormat) -> Floats:
    """List the numbers halfway between two places, each after the place below it."""
    places = _places(fmt)
    return (places[:-1] + places[1:]) / 2


@functools.cache
def _counts(fmt: ElementFormat) -> bool:
    """Return True for formats of integers, whose magnitudes are 0, 1, 2 and so on."""
    places = _places(fmt)
    return np.array_equal(places, np.arange(len(places)))


def round_to_bits(x: Floats, bits: int) -> Floats:
    """Round to numbers with `bits` significant bits, ties to even."""
    fraction, exponent = np.frexp(x)
    return np.asarray(np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits))


def quantize(x: Floats, q: QuantizerSettings, *, double: bool = False) -> Floats:
    """Return what `qgate.quantize` has to return, before the cast to the tensor's dtype.

    `double` says that x came from a float64 tensor, whose scales are float64, not float32.
    """
    x = np.asarray(x, dtype=np.float64)
    fmt = q.format
    if q.rotation is not None:
        return _rotated(x, q, double)
    if fmt.kind == "block" and fmt.by_rows:
        return _by_rows(x, q, double)
    if fmt.kind == "block" and fmt.by_blocks:
        return _by_stored_scales(x, q, double)
    if fmt.kind == "block":
        state = fmt.define_state(x)
        return by_blocks(x, q, lambda rows: fmt.define(rows, q, state, double))
    if q.scale is None and q.granularity is None:
        return round_by_list(x, fmt, rounding=q.rounding, saturate=q.saturate, narrow=q.narrow)
    if q.groups is not None:
        return q.groups.apply(x, lambda rows: _scaled(rows, q, double))
    if q.granularity == "block":
        return by_blocks(x, q, lambda rows: _scaled(rows, q, double))
    if q.granularity == "channel":
        moved = np.moveaxis(np.atleast_1d(x), q.axis_of(x.ndim), 0)
        groups = moved.reshape(len(moved), math.prod(moved.shape[1:]))
        y = _scaled(groups, q, double).reshape(moved.shape)
        return np.moveaxis(y, 0, q.axis_of(x.ndim)).reshape(x.shape)
    return _scaled(x.reshape(1, -1), q, double).reshape(x.shape)


def amax_scales(groups: Floats, q: QuantizerSettings, double: bool) -> Floats:
    """Return amax / max of each row in the scale's dtype: float32, or float64 for float64."""
    number = np.float64 if double else np.float32
    largest = float(np.finfo(number).max)
    smallest = np.finfo(number).smallest_subnormal if number is np.float32 else 2.0**-1022
    amax = np.abs(groups).max(axis=1, initial=0.0)
    scales = (np.minimum(amax, largest) / q.format.max).astype(number).astype(np.float64)
    scales = np.where(amax == 0, 1.0, np.maximum(scales, float(smallest)))
    return np.where(np.isinf(amax) & (q.inf != "saturate"), np.nan, scales)


def better_scales(groups: Floats, scales: Floats, q: QuantizerSettings) -> Floats:
    """Return the scale of each row of a tapered format: 1, unless amax / max has a smaller error.

    The error is the sum of squares before the cast to the tensor's dtype. Sums that agree to 2^-40
    count as equal, because the order of additions moves them that far, and then the scale is 1.
    Rows with NaN or Inf keep the scale that they have.
    """
    fmt, q = q.format, q.deterministic()
    assert fmt.kind == "element"
    amax = np.abs(groups).max(axis=1, initial=0.0)
    unit = np.exp2(np.frexp(np.where(amax > 0, amax, 1.0))[1] - 1.0)[:, None]

    def error(factor: Floats) -> Floats:
        y = round_by_list(groups / factor, fmt, rounding=q.rounding, saturate=q.saturate)
        return np.asarray(np.square((y * factor - groups) / unit).sum(axis=1))

    with np.errstate(invalid="ignore"):
        keeps = error(scales[:, None]) < error(np.ones((1, 1))) * CLEARLY_LESS
    return np.where(keeps | ~np.isfinite(amax), scales, 1.0)


def fit_zero_points(groups: Floats, q: QuantizerSettings, double: bool) -> tuple[Floats, Floats]:
    """Return scale and zero point of each row from its ends, 0 among them, as ONNX makes them.

    s = (max - min) / (last - first),  z = first - round(min / s), within [first, last]: each step
    is one operation in the dtype of the scale, but max - min may be beyond it.
    """
    number = np.float64 if double else np.float32
    largest = float(np.finfo(number).max)
    smallest = np.finfo(number).smallest_subnormal if number is np.float32 else 2.0**-1022
    first, last = q.format.element.bounds(narrow=q.narrow)
    high = np.minimum(groups.max(axis=1, initial=0.0), largest)
    low = np.minimum((-groups).max(axis=1, initial=0.0), largest)
    with np.errstate(over="ignore", invalid="ignore"):
        span = high + low
        span = np.where(span > largest, span, span.astype(number).astype(np.float64))
        scales = (span / (last - first)).astype(number).astype(np.float64)
        scales = np.where(span == 0, 1.0, np.clip(scales, float(smallest), largest))
        below = (low / scales).astype(number).astype(np.float64)
        zero_points = np.clip(first + np.rint(below), first, last)
    bad = poisoned(groups, q)
    return np.where(bad, np.nan, scales), np.where(bad, 0.0, zero_points)


def round_to_integers(x: Floats, rounding: Rounding) -> Floats:
    """Round to integers without a bound."""
    cut = np.trunc(x)
    if rounding == "zero":
        return cut
    if rounding == "away":
        return np.asarray(cut + np.sign(x) * (np.abs(x - cut) >= 0.5))
    return np.rint(x)


def scales_and_zero_points(
    groups: Floats, q: QuantizerSettings, double: bool = False
) -> tuple[Floats, Floats]:
    """Return scale and zero point of each row, fitted or as given."""
    if q.zero_point == "minmax":
        return fit_zero_points(groups, q, double)
    scale, zero_point = (float(figure) for figure in (q.scale, q.zero_point))  # type: ignore[arg-type]
    scale = scale if double else float(np.float32(scale))
    return np.full(len(groups), scale), np.full(len(groups), zero_point)


def codes_above_zero(ratios: Floats, zero_points: Floats, q: QuantizerSettings) -> Floats:
    """Round x / scale to codes, saturated in the format's range, and subtract the zero point."""
    low, high = q.format.element.bounds(narrow=q.narrow)
    codes = round_to_integers(ratios, q.rounding) + zero_points
    return np.asarray(np.clip(codes, low, high) - zero_points)


def _scaled(groups: Floats, q: QuantizerSettings, double: bool) -> Floats:
    """Quantize rows that have one scale each to an element format."""
    assert q.format.kind == "element"
    if q.zero_point is not None:
        fitted = scales_and_zero_points(groups, q, double)
        scales, zero_points = (figures[:, None] for figures in fitted)
        with np.errstate(over="ignore", invalid="ignore"):
            return codes_above_zero(groups / scales, zero_points, q) * scales
    if q.scale is None:
        scales = amax_scales(groups, q, double)
        scales = better_scales(groups, scales, q) if q.format.tapered else scales
        scales = scales[:, None]
    else:
        scales = np.full((len(groups), 1), float(q.scale))
        scales = scales if double else scales.astype(np.float32).astype(np.float64)
    y = round_by_list(
        groups / scales, q.format, rounding=q.rounding, saturate=q.saturate, narrow=q.narrow
    )
    with np.errstate(over="ignore"):  # the largest float64 scale, made from an Inf
        return y * scales


def hadamard(rows: Floats) -> Floats:
    """Multiply each row by the Hadamard matrix of Sylvester, half by half."""
    half = rows.shape[1] // 2
    if not half:
        return rows
    low, high = hadamard(rows[:, :half]), hadamard(rows[:, half:])
    return np.concatenate([low + high, low - high], axis=1)


def _rotated(x: Floats, q: QuantizerSettings, double: bool) -> Floats:
    """Rotate blocks, round to float32 (but not float64), quantize, and rotate back."""
    assert q.rotation is not None
    plain, signs = copy.copy(q), np.array(q.rotation, dtype=np.float64)
    plain.rotation = None
    unit = 1 / math.sqrt(len(signs))
    moved = np.moveaxis(x, q.rotation_axis, -1)
    turned = hadamard(moved.reshape(-1, len(signs)) * signs) * unit
    with np.errstate(over="ignore"):
        turned = turned if double else turned.astype(np.float32).astype(np.float64)
    back = np.moveaxis(turned.reshape(moved.shape), -1, q.rotation_axis)
    y = np.moveaxis(quantize(back, plain, double=double), q.rotation_axis, -1)
    blocks = hadamard(y.reshape(-1, len(signs))) * unit * signs
    return np.moveaxis(blocks.reshape(moved.shape), -1, q.rotation_axis)


def _by_rows(x: Floats, q: QuantizerSettings, double: bool) -> Floats:
    """Quantize each row along the axis of the blocks as a tensor of its own."""
    fmt, alone = q.format, copy.copy(q)
    assert fmt.kind == "block"
    alone.axis = 0
    moved = np.moveaxis(x, q.axis_of(x.ndim), -1) if x.ndim else x.reshape(1)
    y = np.empty_like(moved)
    for index in np.ndindex(moved.shape[:-1]):
        define = functools.partial(
            fmt.define, q=q, state=fmt.define_state(moved[index]), double=double
        )
        y[index] = by_blocks(moved[index], alone, define)
    return np.moveaxis(y, -1, q.axis_of(x.ndim)) if x.ndim else y.reshape(())


def _by_stored_scales(x: Floats, q: QuantizerSettings, double: bool) -> Floats:
    """Quantize to elements, and multiply them by scales that are made of those of all blocks."""
    fmt = q.format
    assert fmt.kind == "block"
    sizes = np.abs(np.where(np.isfinite(x), x, 0.0))
    largest = by_blocks(sizes, q, lambda rows: np.tile(rows.max(1, keepdims=True), rows.shape[1]))
    elements = by_blocks(x, q, lambda rows: fmt.define(rows, q, 1.0, double))
    length = x.shape[-1] if x.ndim else 1
    stored = fmt.define_stored(largest.reshape(-1, length)[:, :: q.block])
    return elements * np.repeat(stored, q.block, axis=1)[:, :length].reshape(x.shape)


def by_blocks(x: Floats, q: QuantizerSettings, define: Callable[[Floats], Floats]) -> Floats:
    """Quantize each block as a row: the whole blocks first, then the short last ones."""
    if q.tile is not None:
        return _by_tiles(x, q.tile, define)
    moved = np.moveaxis(x, q.axis_of(x.ndim), -1) if x.ndim else x.reshape(1)
    lines = moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])
    y: Floats = np.empty_like(lines)
    end = lines.shape[1] // q.block * q.block
    for part in (slice(0, end), slice(end, None)):
        blocks = lines[:, part]
        if blocks.size:
            width = min(q.block, blocks.shape[1])
            y[:, part] = define(blocks.reshape(-1, width)).reshape(blocks.shape)
    y = y.reshape(moved.shape)
    return np.moveaxis(y, -1, q.axis_of(x.ndim)) if x.ndim else y.reshape(())


def _by_tiles(x: Floats, tile: tuple[int, int], define: Callable[[Floats], Floats]) -> Floats:
    """Quantize each tile of the last two axes as a row, short ones filled with zeros."""
    y: Floats = np.empty_like(x)
    matrices = math.prod(x.shape[:-2])
    for top in range(0, x.shape[-2], tile[0]):
        for first in range(0, x.shape[-1], tile[1]):
            part = (..., slice(top, top + tile[0]), slice(first, first + tile[1]))
            height, width = x[part].shape[-2:]
            filled = np.zeros((matrices, *tile))
            filled[:, :height, :width] = x[part].reshape(matrices, height, width)
            values = define(filled.reshape(matrices, -1)).reshape(filled.shape)
            y[part] = values[:, :height, :width].reshape(x[part].shape)
    return y
