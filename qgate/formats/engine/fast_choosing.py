"""Blocks on the better of two grids in float32, by the definition where errors nearly agree."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.formats._grids import BlockGrid
from qgate.formats._scratch import BoundedCache, buffer
from qgate.formats._work import SINGLE, CastContext, single
from qgate.formats.choosing import ChoosingFormat
from qgate.formats.engine.dtypes import FP32_MAX, narrow
from qgate.formats.engine.fast_nvfp4 import ORDINARY, FloatRounding
from qgate.formats.floats import FloatFormat
from qgate.formats.nvfp4 import Singles

BoolArray = npt.NDArray[np.bool_]
f32 = np.float32
MUCH = 1.0
"""Largest magnitudes of blocks, times s_enc, from which on no scale is zero."""
NEAR = f32(2.0**-16)
"""Share of errors and largest values below which the difference of two errors is not trusted.

The errors here differ from the definition's by the rounding of each value, 8 * 2^-24 of the largest
at most, and by that of the sum.
"""
_roundings = BoundedCache(16)


def shortcut(fmt: ChoosingFormat, x: Tensor, out: Tensor, context: CastContext) -> bool:
    """Write the quantized chunk to `out`, or return False.

    Figures of blocks are arrays, not tensors: numpy takes less time for a few thousand.
    """
    q, state, dtype = context.q, context.state, x.dtype
    if context.double or q.rounding != "even" or fmt.by_rows or context.width:
        return False
    if state is None or x.device.type != "cpu" or context.amax_bits is None:
        return False
    encode_scale = single(float(state.item()))
    if not 1 / ORDINARY < encode_scale < ORDINARY:
        return False
    if dtype != torch.float32:
        x = buffer("single", x.shape, torch.float32, x.device).copy_(x)
    amax = context.amax_bits.view(dtype).to(torch.float32).numpy()
    decode, smallest = f32(1.0 / encode_scale), float(amax.min()) * encode_scale
    scales = _block_scales(fmt, amax, f32(encode_scale))
    full = scales * decode
    with np.errstate(divide="ignore", over="ignore"):
        encode = np.minimum(f32(1) / full, f32(FP32_MAX))
    sides = [
        _on_grid(fmt, plan, x, scales[plan.row], full[plan.row], encode[plan.row], smallest)
        for plan in _plans(fmt)
    ]
    first, second = sides
    one, two = first.error, second.error
    chosen = two < one
    of_values = 2 * amax if fmt.error == "mae" else amax * amax * f32(0.125)
    near = np.abs(two - one) <= (one + two + of_values) * NEAR
    if smallest < MUCH:  # a scale may be 0, whose ratios tell no error
        near |= (first.scale == 0) | (second.scale == 0)
        near &= amax > 0
    if near.any():
        chosen[near] = _decided(fmt, x, sides, near, float(state.item()))
    last, second_scale = np.full_like(second.scale, decode), second.scale
    factor: Tensor | float = float(decode)
    if (unit := fmt.grids[1].unit) != 1:
        np.copyto(last, second.scale * decode * f32(unit), where=chosen)
        factor, second_scale = torch.from_numpy(last), np.ones_like(last)
    work = torch.float64 if out.dtype == torch.float64 else torch.float32
    # One of two products is zero, so that the sum is the other one; both have the sign of x.
    y = first.elements.to(work).mul_(torch.from_numpy(first.scale * ~chosen))
    y.addcmul_(second.elements.to(work), torch.from_numpy(second_scale * chosen).to(work))
    if not isinstance(fmt.grids[1].element, FloatFormat):  # integers have one zero
        y.add_(torch.from_numpy(np.where(chosen, f32(0), f32(-0.0))))
    if out.dtype == torch.float32:
        torch.mul(y, factor, out=out)
        return True
    tied = _tied_blocks(fmt, sides, chosen, float(decode), out.dtype)
    if tied is None:
        out.copy_(y.mul_(factor))
        return True
    exact_scale = torch.from_numpy(last[tied].astype(np.float64))[:, None]
    exact = narrow(_blocks(y, tied).double().mul_(exact_scale), out.dtype)
    out.copy_(y.mul_(factor))
    out.movedim(2, -1)[torch.from_numpy(tied).squeeze(2)] = exact
    return True


class Side(NamedTuple):
    """One grid's elements, the scales of blocks, and the sums of their errors."""

    elements: Tensor
    scale: Singles
    error: Singles


class GridPlan(NamedTuple):
    """A grid with the row of its scales, and the bounds from which its ratios are clamped."""

    grid: BlockGrid
    number: int
    row: int
    reaches: bool
    """True if ratios may be beyond the largest element."""
    normal_from: float
    """The magnitude, times s_enc, from which scales have all their bits."""


@lru_cache(maxsize=16)
def _plans(fmt: ChoosingFormat) -> tuple[GridPlan, ...]:
    plans = []
    for number, grid in enumerate(fmt.grids):
        at_most = grid.largest / grid.factor / grid.unit * (1 + 2.0**-4)
        reaches = at_most >= grid.element.saturates_from()
        normal_from = fmt.scale_element.min_normal * grid.largest / grid.factor
        row = number if grid.unit == 1 else 0  # its scales are those of the first grid
        plans.append(GridPlan(grid, number, row, reaches, normal_from))
    return tuple(plans)


def _block_scales(fmt: ChoosingFormat, amax: Singles, encode: np.float32) -> Singles:
    """Return the stored scales of each row of scales, rounded as `FloatRounding` rounds."""
    element = fmt.scale_element
    assert isinstance(element, FloatFormat)
    grids = [plan.grid for plan in _plans(fmt) if plan.row == plan.number]
    base: Singles = np.empty((len(grids), *amax.shape), f32)
    for row, grid in zip(base, grids, strict=True):
        np.divide(amax, f32(grid.largest), out=row)
    base *= encode
    for row, grid in zip(base, grids, strict=True):
        if grid.factor != 1:
            row *= f32(grid.factor)
    np.minimum(base, f32(element.max), out=base)
    field = base.view(np.uint32) & np.uint32(SINGLE.exponent_mask)
    np.maximum(field, np.uint32((element.min_exponent + SINGLE.bias) << 23), out=field)
    np.subtract(np.uint32((2 * SINGLE.bias + element.mantissa) << 23), field, out=field)
    inverse = field.view(f32)
    base *= inverse
    np.rint(base, out=base)
    base /= inverse
    return base


def _on_grid(
    fmt: ChoosingFormat,
    plan: GridPlan,
    x: Tensor,
    scale: Singles,
    full: Singles,
    encode: Singles,
    smallest: float,
) -> Side:
    """Round all blocks to a grid; `smallest` is the least of their amax, times s_enc."""
    grid = plan.grid
    elements = buffer(("elements", "others")[plan.number], x.shape, torch.float32, x.device)
    ratios = buffer("ratios", x.shape, torch.float32, x.device)
    if grid.unit == 1:
        torch.mul(x, torch.from_numpy(encode), out=ratios)
    else:
        ratios.mul_(single(1 / grid.unit))
        full = full * f32(grid.unit)
    scratch = buffer("bits", x.shape, torch.int32, x.device)
    clamps = plan.reaches or smallest < plan.normal_from
    _round(grid, ratios, elements, scratch, clamps=clamps)
    error = scratch.view(torch.float32)
    torch.sub(elements, ratios, out=error)
    if fmt.error == "mae":
        error.abs_()
    else:
        error.mul_(error)
        full = full * full
    if x.shape[3] > 1:
        total = error.sum(2, keepdim=True).numpy()
    else:  # a product takes half the time of torch's sums along short rows
        ones = np.ones(x.shape[2], f32)
        total = (error.view(-1, x.shape[2]).numpy() @ ones).reshape(scale.shape)
    if smallest < MUCH:
        total = np.where(scale > 0, total, f32(0))
    return Side(elements, scale, total * full)


def _decided(
    fmt: ChoosingFormat, x: Tensor, sides: list[Side], near: BoolArray, state: float
) -> BoolArray:
    """Choose as the definition does, in float32 step by step, for a few blocks."""
    blocks, totals = _blocks(x, near).numpy(), []
    for grid, side in zip(fmt.grids, sides, strict=True):
        elements = _blocks(side.elements, near).numpy()
        decoded = elements * side.scale[near][:, None] * f32(fmt.bound / state) * f32(grid.unit)
        errors = np.abs(decoded / f32(fmt.bound) - blocks)
        errors = errors if fmt.error == "mae" else errors * errors
        totals.append(np.cumsum(errors, axis=1, dtype=f32)[:, -1])
    return totals[1] <= totals[0] if fmt.second_wins else totals[1] < totals[0]


def _blocks(t: Tensor, mask: BoolArray) -> Tensor:
    """Return the blocks of a mask as rows."""
    if t.is_contiguous() and t.shape[3] == 1:
        return t.view(-1, t.shape[2]).index_select(0, torch.from_numpy(mask.ravel().nonzero()[0]))
    return t.movedim(2, -1)[torch.from_numpy(mask.squeeze(2))]


def _round(grid: BlockGrid, ratios: Tensor, out: Tensor, scratch: Tensor, *, clamps: bool) -> None:
    """Round ratios to a grid's elements."""
    fmt = grid.element
    source = torch.clamp(ratios, -fmt.max, fmt.max, out=out) if clamps else ratios
    if not isinstance(fmt, FloatFormat) or fmt.exponent_bits == 1:  # integers
        torch.round(source, out=out)
    elif fmt.mantissa_bits == 0:  # 0, 1, 2, 4: the tie of 3 goes to 2, whose code is even
        beyond = torch.mul(ratios, single(1 / 6), out=scratch.view(torch.float32))
        torch.clamp(ratios, -2, 2, out=out).round_().add_(beyond.clamp_(-1, 1).round_(), alpha=2)
    else:
        rounding = _roundings.get(fmt, lambda: FloatRounding(fmt))
        rounding.round(source, scratch, "even", out)


def _tied_blocks(
    fmt: ChoosingFormat, sides: list[Side], chosen: BoolArray, decode: float, dtype: torch.dtype
) -> BoolArray | None:
    """Find blocks whose values float32 would round to a tie of a 16-bit dtype."""
    if dtype.itemsize != 2:
        return None
    scales = _tied_scales(fmt, decode, dtype)
    if not any(len(tied) for tied in scales):
        return None
    first, second = (np.isin(side.scale, tied) for side, tied in zip(sides, scales, strict=True))
    tied = np.where(chosen, second, first)
    return tied if tied.any() else None


@lru_cache(maxsize=64)
def _tied_scales(fmt: ChoosingFormat, decode: float, dtype: torch.dtype) -> tuple[Singles, Singles]:
    """Return the scales, for each grid, whose values float32 would round to a tie of the dtype."""
    scales, tied = torch.tensor(fmt.scale_element.magnitudes(), device="cpu"), []
    for grid in fmt.grids:
        full = scales * decode
        if grid.unit != 1:
            full = (full.float() * single(grid.unit)).double()
        values = torch.outer(torch.tensor(grid.element.magnitudes(), device="cpu"), full)
        is_tied = (values.float().to(dtype) != narrow(values, dtype)).any(0)
        tied.append(scales[is_tied].float().numpy())
    return tied[0], tied[1]
