"""The readable definition of every format: rounding by the list of values, in plain numpy.

This is what the formats mean; the fast code has to agree with it bit for bit, and the gate takes
its ideal quantizers from here so that no code under test judges itself. Input and result are
float64, exact for tensors of at most 32 bits (and for float64 where scales are powers of two);
cast the result once to the dtype you need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qgate.errors import QgateError
from qgate.formats._block import BlockFormat
from qgate.formats._element import ElementFormat, Floats, Rounding

if TYPE_CHECKING:
    from qgate.formats.quantizer import Quantizer


def round_by_list(
    x: Floats,
    fmt: ElementFormat,
    *,
    rounding: Rounding | None = None,
    saturate: bool = True,
    narrow: bool = True,
) -> Floats:
    """Each number to one of the values beside it in the format's list.

    The nearest one; of two equally near, the one at an even place in the list of magnitudes
    ("even") or the larger one ("away"); "zero" takes the one nearer zero. Beyond the largest value
    the list goes on with the step it ended with, and what is rounded there has overflowed.
    """
    rounding = rounding or fmt.rounding
    listed = fmt.magnitudes()
    low, high = fmt.bounds(narrow=narrow)
    step = 2.0 ** (fmt.max_exponent - fmt.mantissa)
    places = np.append(listed, listed[-1] + step * np.arange(1, 4))
    size = np.minimum(np.abs(x), places[-1])
    size = np.where(np.isnan(x), 0.0, size)
    below = np.minimum(np.searchsorted(places, size, side="right") - 1, len(places) - 2)
    middle = (places[below] + places[below + 1]) / 2
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
        over = np.abs(y) > high
        if rounding == "zero":
            y = np.where(over & np.isfinite(x), np.clip(y, low, high), y)
            over &= ~np.isfinite(x)
        y = np.where(over, np.copysign(np.inf, x) if fmt.has_inf else np.nan, y)
    if fmt.negative_zero is None:
        y = y + 0.0
    return np.where(np.isnan(x), np.nan, y)


def round_to_bits(x: float, bits: int) -> float:
    """The nearest number with `bits` significant bits, ties to even."""
    if x == 0 or not np.isfinite(x):
        return x
    fraction, exponent = np.frexp(x)
    return float(np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits))


def quantize(x: Floats, q: Quantizer, *, double: bool = False) -> Floats:
    """What `qgate.quantize` has to return, before the cast to the tensor's dtype.

    `double` says that x came from a float64 tensor: its scales are float64 then, not float32.
    """
    x = np.asarray(x, dtype=np.float64)
    if isinstance(q.format, BlockFormat):
        fmt = q.format
        state = fmt.define_state(x)
        return _by_blocks(x, q, lambda rows: fmt.define(rows, q, state, double))
    element = q.format
    if q.scale is None and q.granularity is None:
        return round_by_list(x, element, rounding=q.rounding, saturate=q.saturate, narrow=q.narrow)
    if q.granularity == "block":
        return _by_blocks(x, q, lambda rows: np.stack([_scaled(row, q, double) for row in rows]))
    if q.granularity == "channel":
        moved = np.moveaxis(x, q.axis_of(x.ndim), 0)
        y = np.stack([_scaled(part, q, double) for part in moved])
        return np.moveaxis(y, 0, q.axis_of(x.ndim))
    return _scaled(x, q, double)


def amax_scale(x: Floats, q: Quantizer, double: bool) -> float:
    """amax / max as a number of the scale's dtype: float32, or float64 for float64 tensors."""
    number = np.float64 if double else np.float32
    if np.isnan(x).any() or (np.isinf(x).any() and q.inf != "saturate"):
        return np.nan
    amax = float(np.abs(x).max(initial=0.0))
    largest = np.finfo(number).max
    scale = number(min(amax, float(largest)) / q.format.max)
    smallest = np.finfo(number).smallest_subnormal if number is np.float32 else 2.0**-1022
    return float(max(scale, smallest)) if amax else 1.0


def _scaled(x: Floats, q: Quantizer, double: bool) -> Floats:
    """One group of an element format."""
    scale = amax_scale(x, q, double) if q.scale is None else float(q.scale)
    assert isinstance(q.format, ElementFormat)
    if np.isnan(scale):
        return np.full_like(x, np.nan)
    if not double:
        scale = float(np.float32(scale))
    y = round_by_list(
        x / scale, q.format, rounding=q.rounding, saturate=q.saturate, narrow=q.narrow
    )
    return y * scale


def _by_blocks(x: Floats, q: Quantizer, define: Rows) -> Floats:
    moved = np.moveaxis(x, q.axis_of(x.ndim), -1) if x.ndim else x.reshape(1)
    rows = moved.reshape(-1, moved.shape[-1])
    y: Floats = np.empty_like(rows)
    for start in range(0, rows.shape[1], q.block):
        y[:, start : start + q.block] = define(rows[:, start : start + q.block])
    y = y.reshape(moved.shape)
    return np.moveaxis(y, -1, q.axis_of(x.ndim)) if x.ndim else y.reshape(())


if TYPE_CHECKING:
    from collections.abc import Callable

    Rows = Callable[[Floats], Floats]
