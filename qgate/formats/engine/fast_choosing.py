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
from qgate.formats._work import SINGLE, CastContext, single, widen
from qgate.formats.choosing import ChoosingFormat
from qgate.formats.engine.dtypes import FP32_MAX, combine, narrow
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
    decode = f32(1.0 / encode_scale)
    sides: list[Side] = []
    for grid in fmt.grids:
        if not sides or grid.unit == 1:  # else the scales of the first grid are these, too
            scale = _block_scales(fmt, grid, amax, f32(encode_scale))
        sides.append(_on_grid(fmt, grid, x, scale, decode, len(sides)))
    first, second = sides
    one, two = first.error, second.error
    chosen = two < one
    of_values = 2 * amax if fmt.error == "mae" else amax * amax * f32(0.125)
    near = np.abs(two - one) <= (one + two + of_values) * NEAR
    if float(amax.min()) < MUCH / encode_scale:  # a scale may be 0, whose ratios tell no error
        near |= (first.scale == 0) | (second.scale == 0)
        near &= amax > 0
    if near.any():
        chosen[near] = _decided(fmt, x, sides, near, float(state.item()))
    last: Tensor | float = float(decode)
    factor = second.scale
    if (unit := fmt.grids[1].unit) != 1:
        factor = factor * decode * f32(unit)
        last = torch.from_numpy(np.where(chosen, f32(1), decode))
    work = torch.float64 if out.dtype == torch.float64 else torch.float32
    # One of two products is zero, so that the sum is the other one; both have the sign of x.
    y = first.elements.to(work).mul_(torch.from_numpy(first.scale * ~chosen))
    y.addcmul_(second.elements.to(work), torch.from_numpy(factor * chosen).to(work))
    if not isinstance(fmt.grids[1].element, FloatFormat):  # integers have one zero
        y.add_(torch.from_numpy(np.where(chosen, f32(0), f32(-0.0))))
    if out.dtype == torch.float32:
        torch.mul(y, last, out=out)
    else:
        out.copy_(y.mul_(last))
    if out.dtype.itemsize == 2:
        tied = _tied_scales(fmt, float(decode), out.dtype)
        twice = np.where(chosen, np.isin(second.scale, tied[1]), np.isin(first.scale, tied[0]))
        if any(len(scales) for scales in tied) and twice.any():
            _define(fmt, x, out, torch.from_numpy(twice), context)
    return True


class Side(NamedTuple):
    """One grid's elements, the scales of blocks, and the sums of their errors."""

    elements: Tensor
    scale: Singles
    error: Singles


def _block_scales(
    fmt: ChoosingFormat, grid: BlockGrid, amax: Singles, encode: np.float32
) -> Singles:
    """Return the stored scales, rounded as `FloatRounding` rounds."""
    element = fmt.scale_element
    assert isinstance(element, FloatFormat)
    base = amax / f32(grid.largest) * encode
    base = base if grid.factor == 1 else base * f32(grid.factor)
    base = np.minimum(base, f32(element.max), out=base)
    field = base.view(np.uint32) & np.uint32(SINGLE.exponent_mask)
    np.maximum(field, np.uint32((element.min_exponent + SINGLE.bias) << 23), out=field)
    inverse = (np.uint32((2 * SINGLE.bias + element.mantissa) << 23) - field).view(f32)
    return np.asarray(np.rint(base * inverse) / inverse)


def _on_grid(
    fmt: ChoosingFormat, grid: BlockGrid, x: Tensor, scale: Singles, decode: np.float32, number: int
) -> Side:
    elements = buffer(("elements", "others")[number], x.shape, torch.float32, x.device)
    ratios = buffer("ratios", x.shape, torch.float32, x.device)
    full = scale * decode
    if grid.unit == 1:
        with np.errstate(divide="ignore", over="ignore"):
            encode = np.minimum(f32(1) / full, f32(FP32_MAX))
        torch.mul(x, torch.from_numpy(encode), out=ratios)
    else:
        ratios.mul_(single(1 / grid.unit))
        full = full * f32(grid.unit)
    scratch = buffer("bits", x.shape, torch.int32, x.device)
    at_most = grid.largest / grid.factor / grid.unit * (1 + 2.0**-4)
    is_normal = float(scale.min()) >= fmt.scale_element.min_normal
    clamps = not is_normal or at_most >= grid.element.saturates_from()
    _round(grid, ratios, elements, scratch, clamps=clamps)
    error = scratch.view(torch.float32)
    torch.sub(elements, ratios, out=error)
    error = error.abs_() if fmt.error == "mae" else torch.mul(error, error, out=error)
    if x.shape[3] > 1:
        total = error.sum(2, keepdim=True).numpy()
    else:
        ones = error.new_ones(x.shape[2])
        total = torch.mv(error.view(-1, x.shape[2]), ones).numpy().reshape(scale.shape)
    total = np.where(scale > 0, total, 0) * (full if fmt.error == "mae" else full * full)
    return Side(elements, scale, total)


def _decided(
    fmt: ChoosingFormat, x: Tensor, sides: list[Side], near: BoolArray, state: float
) -> BoolArray:
    """Choose as the definition does, in float32 step by step, for a few blocks."""
    mask = near.squeeze(2)
    blocks, totals = np.moveaxis(x.numpy(), 2, -1)[mask], []
    for grid, side in zip(fmt.grids, sides, strict=True):
        elements = np.moveaxis(side.elements.numpy(), 2, -1)[mask]
        decoded = elements * side.scale[near][:, None] * f32(fmt.bound / state) * f32(grid.unit)
        errors = np.abs(decoded / f32(fmt.bound) - blocks)
        errors = errors if fmt.error == "mae" else errors * errors
        totals.append(np.cumsum(errors, axis=1, dtype=f32)[:, -1])
    return totals[1] <= totals[0] if fmt.second_wins else totals[1] < totals[0]


def _round(grid: BlockGrid, ratios: Tensor, out: Tensor, scratch: Tensor, *, clamps: bool) -> None:
    """Round ratios to a grid's elements."""
    fmt = grid.element
    source = torch.clamp(ratios, -fmt.max, fmt.max, out=out) if clamps else ratios
    if not isinstance(fmt, FloatFormat) or fmt.exponent_bits == 1:  # integers
        torch.round(source, out=out)
    elif fmt.mantissa_bits == 0:  # 0, 1, 2, 4: the tie of 3 goes to 2, whose code is even
        torch.abs(ratios, out=out)
        beyond = out > 3
        out.clamp_(max=2).round_().add_(beyond, alpha=2).copysign_(ratios)
    else:
        rounding = _roundings.get(fmt, lambda: FloatRounding(fmt))
        rounding.round(source, scratch, "even", out)


def _define(
    fmt: ChoosingFormat, x: Tensor, out: Tensor, blocks: Tensor, context: CastContext
) -> None:
    """Quantize some blocks as the definition does."""
    mask = blocks.squeeze(2)
    parts = fmt.split(widen(x.movedim(2, -1)[mask][None, :, :, None]), context)
    values = combine(parts.elements, parts.scale, out.dtype, context)
    out.movedim(2, -1)[mask] = values[0, :, :, 0]


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
