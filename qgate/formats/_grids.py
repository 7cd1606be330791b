"""The grids that a block may be on, and the errors by which it chooses."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qgate.arithmetic import divided
from qgate.formats._element import ElementFormat
from qgate.formats._work import CastContext, single
from qgate.formats.definition import round_by_list
from qgate.formats.floats import to_single_grid
from qgate.formats.nvfp4 import FP32_MAX, Nvfp4Format, Singles, decode_scale
from qgate.formats.options import CastOptions, Floats

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BlockGrid:
    """Values that a block may take: elements, times `unit`, times its largest * factor / largest.

    `codes` has the codes of the elements where these are not the element's own.
    """

    element: ElementFormat
    largest: float
    factor: float = 1.0
    unit: float = 1.0
    codes: ElementFormat | None = None


def sum_errors(
    grid: BlockGrid,
    x: Tensor,
    block_scale: Tensor,
    ratios: Tensor,
    context: CastContext,
    bound: float,
    squares: bool,
) -> Tensor:
    """Return the sum of each block's errors on one grid."""
    assert context.state is not None
    rounding = "even" if context.q.rounding == "stochastic" else context.q.rounding
    codes = grid.element.cast(ratios, context.work, rounding=rounding)
    amax = to_single_grid(bound / context.state)
    values = to_single_grid(codes * block_scale * amax)
    if grid.unit != 1:
        values = to_single_grid(values * single(grid.unit))
    x = to_single_grid(x) if context.double else x
    error = to_single_grid(to_single_grid(divided(values, bound)) - x).abs_()
    error = to_single_grid(error.square_()) if squares else error
    return _error_sum(error, context.width or x.shape[2])


def define_on_grid(
    fmt: Nvfp4Format,
    grid: BlockGrid,
    x: Floats,
    q: CastOptions,
    state: float,
    *,
    double: bool,
    squares: bool,
) -> tuple[Floats, Floats, Singles]:
    """Return elements and scales of rows on one grid, and the sums of their errors."""
    fp32, decode = np.float32, decode_scale(state)
    amax = np.abs(x).max(axis=1).astype(fp32)
    encode = fp32(min(state, FP32_MAX))
    stored = fmt.define_scale(amax / fp32(grid.largest) * encode * fp32(grid.factor))
    ratios = fmt.define_ratios(x, stored, state, double)
    scales = stored.astype(np.float64) * float(decode)
    if grid.unit != 1:
        ratios = ratios * float(fp32(1 / grid.unit))
        ratios = ratios if double else ratios.astype(fp32).astype(np.float64)
        scales = (stored * decode * fp32(grid.unit)).astype(np.float64)
    codes = round_by_list(ratios, grid.element, rounding=q.rounding)
    decoded = codes.astype(fp32) * stored[:, None] * fp32(fmt.bound / state)
    errors = np.abs(decoded * fp32(grid.unit) / fp32(fmt.bound) - x.astype(fp32))
    errors = errors * errors if squares else errors
    width = q.tile[1] if q.tile is not None else x.shape[1]
    return codes, scales, _defined_sum(errors, width)


def define_choice(
    first: tuple[Floats, Floats, Singles],
    second: tuple[Floats, Floats, Singles],
    second_wins: bool,
    favor: float,
) -> tuple[Floats, Floats]:
    """Return the elements and scales of the better grid; `favor` multiplies the first's errors."""
    limit = first[2] if favor == 1 else first[2] * favor
    better = second[2] <= limit if second_wins else second[2] < limit
    return np.where(better[:, None], second[0], first[0]), np.where(better, second[1], first[1])


def _error_sum(errors: Tensor, width: int) -> Tensor:
    """Add float32 numbers along each row of a block in order, then the rows half by half."""
    rows: Tensor = errors.unflatten(2, (-1, width))
    total = rows[:, :, :, 0]
    for column in range(1, width):
        total = to_single_grid(total + rows[:, :, :, column])
    while (count := total.shape[2]) > 1:
        half = 1 << ((count - 1).bit_length() - 1)
        pairs = to_single_grid(total[:, :, : count - half] + total[:, :, half:])
        total = total[:, :, :half].clone()
        total[:, :, : count - half] = pairs
    return total


def _defined_sum(errors: Singles, width: int) -> Singles:
    """Do what `_error_sum` does, by the readable definition."""
    rows = errors.reshape(len(errors), -1, width)
    totals = [functools.reduce(np.add, row.T) for row in rows.swapaxes(0, 1)]
    while (count := len(totals)) > 1:
        half = 1 << ((count - 1).bit_length() - 1)
        pairs = itertools.zip_longest(totals[:half], totals[half:])
        totals = [one if other is None else one + other for one, other in pairs]
    return np.asarray(totals[0])
