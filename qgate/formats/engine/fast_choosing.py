"""Blocks on the better of two grids in float32, by the definition where errors nearly agree."""

from __future__ import annotations

import math
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
_ZEROS = np.array([-0.0, 0.0], dtype=f32)
_PART = 2**17
"""Elements, for each thread, that every operation is done with before the next ones."""


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
    amax = context.amax_bits.view(dtype).to(torch.float32).numpy()
    if x.shape[3] == 1 and x.is_contiguous() and out.is_contiguous():  # rows of blocks in a line
        x, out = (t.view(1, -1, t.shape[2], 1) for t in (x, out))
        amax = amax.reshape(1, -1, 1, 1)
    decode, smallest = f32(1.0 / encode_scale), float(amax.min()) * encode_scale
    scales = _block_scales(fmt, amax, f32(encode_scale))
    full = scales * decode
    with np.errstate(divide="ignore", over="ignore"):
        encode = np.minimum(f32(1) / full, f32(FP32_MAX))
    sides = _on_grids(fmt, x, scales, full, encode, smallest)
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
    of_first, of_second, last, tied = _factors(fmt, sides, chosen, decode, out.dtype)
    # Before elements are multiplied where they are.
    exact = None if tied is None else narrow(_exact(fmt, sides, chosen, decode, tied), out.dtype)
    work = torch.float64 if out.dtype == torch.float64 else torch.float32
    by_first, by_second = (torch.from_numpy(p).to(work) for p in (of_first, of_second))
    by_last = None if last is None else torch.from_numpy(last).to(work)
    # Integers have one zero.
    zeros = None if isinstance(fmt.grids[1].element, FloatFormat) else _ZEROS[chosen.view(np.uint8)]
    y = first.elements if work == torch.float32 else first.elements.to(work)
    for part in _parts(x):
        # One of two products is zero, so that the sum is the other one; both have the sign of x.
        sums = y[part].mul_(by_first[part])
        sums.addcmul_(second.elements[part].to(work), by_second[part])
        if zeros is not None:
            sums.add_(torch.from_numpy(zeros[part]))
        if by_last is None:
            out[part] = sums
        else:
            torch.mul(sums, by_last[part], out=out[part])
    if tied is not None and exact is not None:
        out.movedim(2, -1)[torch.from_numpy(tied).squeeze(2)] = exact
    return True


def _parts(x: Tensor) -> list[tuple[slice, slice]]:
    """Cut blocks into parts that stay in the cache from one operation to the next."""
    step = max(_PART * torch.get_num_threads() // (x.shape[0] * x.shape[2] * x.shape[3]), 1)
    return [(slice(None), slice(start, start + step)) for start in range(0, x.shape[1], step)]


class Side(NamedTuple):
    """One grid's elements, the scales of blocks, and the sums of their errors."""

    elements: Tensor
    scale: Singles
    full: Singles
    """The scale times that of the tensor and the grid's unit, each step in float32."""
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


@lru_cache(maxsize=16)
def _scaled_grids(fmt: ChoosingFormat) -> tuple[BlockGrid, ...]:
    """Return the grids that have a row of scales of their own."""
    return tuple(plan.grid for plan in _plans(fmt) if plan.row == plan.number)


def _block_scales(fmt: ChoosingFormat, amax: Singles, encode: np.float32) -> Singles:
    """Return the stored scales of each row of scales, rounded as `FloatRounding` rounds."""
    element = fmt.scale_element
    assert isinstance(element, FloatFormat)
    grids = _scaled_grids(fmt)
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


def _on_grids(
    fmt: ChoosingFormat,
    x: Tensor,
    scales: Singles,
    full: Singles,
    encode: Singles,
    smallest: float,
) -> tuple[Side, Side]:
    """Round all blocks to both grids; `smallest` is the least of their amax, times s_enc."""
    plans = _plans(fmt)
    elements = [buffer(name, x.shape, torch.float32, x.device) for name in ("elements", "others")]
    totals: Singles = np.empty((2, *scales.shape[1:]), f32)
    factors = torch.from_numpy(encode)
    for part in _parts(x):
        of_x = x[part]
        if x.dtype != torch.float32:
            of_x = buffer("single", of_x.shape, torch.float32, x.device).copy_(of_x)
        ratios = buffer("ratios", of_x.shape, torch.float32, x.device)
        scratch = buffer("bits", of_x.shape, torch.int32, x.device)
        error = scratch.view(torch.float32)
        for plan in plans:
            if plan.grid.unit == 1:
                torch.mul(of_x, factors[plan.row][part], out=ratios)
            else:
                ratios.mul_(single(1 / plan.grid.unit))
            rounded = elements[plan.number][part]
            clamps = plan.reaches or smallest < plan.normal_from
            _round(plan.grid, ratios, rounded, scratch, clamps=clamps)
            torch.sub(rounded, ratios, out=error)
            error = error.abs_() if fmt.error == "mae" else error.mul_(error)
            total = totals[plan.number][part]
            if x.shape[3] > 1 or x.shape[0] > 1:
                total[...] = error.sum(2, keepdim=True).numpy()
            else:  # a product takes half the time of torch's sums along short rows
                np.matmul(error.view(-1, x.shape[2]).numpy(), _ones(x.shape[2]), out=total.ravel())
    sides = []
    for plan, total in zip(plans, totals, strict=True):
        scale, whole = scales[plan.row], full[plan.row]
        if plan.grid.unit != 1:
            whole = whole * f32(plan.grid.unit)
        of_values = whole if fmt.error == "mae" else whole * whole
        if smallest < MUCH:
            total = np.where(scale > 0, total, f32(0))
        sides.append(Side(elements[plan.number], scale, whole, total * of_values))
    return sides[0], sides[1]


@lru_cache(maxsize=16)
def _ones(count: int) -> Singles:
    return np.ones(count, f32)


def _decided(
    fmt: ChoosingFormat, x: Tensor, sides: tuple[Side, Side], near: BoolArray, state: float
) -> BoolArray:
    """Choose as the definition does, in float32 step by step, for a few blocks."""
    blocks, totals = _blocks(x, near).float().numpy(), []
    for grid, side in zip(fmt.grids, sides, strict=True):
        decoded = _blocks(side.elements, near).numpy() * side.scale[near][:, None]
        decoded = decoded * f32(fmt.bound / state)
        decoded = decoded if grid.unit == 1 else decoded * f32(grid.unit)
        decoded /= f32(fmt.bound)
        decoded -= blocks
        errors = np.abs(decoded, out=decoded) if fmt.error == "mae" else decoded * decoded
        totals.append(errors.cumsum(axis=1, dtype=f32)[:, -1])
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


def _factors(
    fmt: ChoosingFormat,
    sides: tuple[Side, Side],
    chosen: BoolArray,
    decode: np.float32,
    dtype: torch.dtype,
) -> tuple[Singles, Singles, Singles | None, BoolArray | None]:
    """Return factors of both grids' elements, of their sums, and blocks to be rounded again.

    Numbers of 16 bits are rounded twice, once as float32; a factor one place beside the right one
    keeps those that were moved to a tie from it.
    """
    first, second = sides
    if dtype.itemsize != 2:
        one = fmt.grids[1].unit != 1
        last = np.full_like(second.scale, decode)
        if one:
            np.copyto(last, second.full, where=chosen)
        return first.scale * ~chosen, (f32(1) if one else second.scale) * chosen, last, None
    factors, tied = [], None
    for side, table, mask in zip(
        sides, _factor_tables(fmt, float(decode), dtype), (~chosen, chosen), strict=True
    ):
        if table is None:
            factors.append(side.full * mask)
            continue
        factor = table.take((side.scale.view(np.uint32) >> 20).astype(np.intp))
        is_tied = np.isnan(factor)
        if is_tied.any():
            factor[is_tied] = 0
            is_tied &= mask
            tied = is_tied if tied is None else tied | is_tied
        factors.append(factor * mask)
    return factors[0], factors[1], None, tied


def _exact(
    fmt: ChoosingFormat,
    sides: tuple[Side, Side],
    chosen: BoolArray,
    decode: np.float32,
    tied: BoolArray,
) -> Tensor:
    """Return the values of a few blocks as float64."""
    first, second = (_blocks(side.elements, tied).double() for side in sides)
    is_second = torch.from_numpy(chosen[tied])[:, None]
    scales = [side.scale[tied].astype(np.float64) * float(decode) for side in sides]
    if fmt.grids[1].unit != 1:
        scales[1] = sides[1].full[tied].astype(np.float64)
    by_first, by_second = (torch.from_numpy(scale)[:, None] for scale in scales)
    return (second * by_second).where(is_second, first * by_first)


@lru_cache(maxsize=64)
def _factor_tables(fmt: ChoosingFormat, decode: float, dtype: torch.dtype) -> list[Singles | None]:
    """Return for each grid the factor of elements with each scale, None where none is special.

    It rounds all elements as float64 does: the product of scale and `decode`, or a number beside
    it, or NaN where neither does. Scales are found by the upper twelve bits of a float32 number,
    which tell those of E4M3 apart.
    """
    scales = torch.tensor(fmt.scale_element.magnitudes(), device="cpu")
    tables: list[Singles | None] = []
    for grid in fmt.grids:
        full = scales * decode
        if grid.unit != 1:
            full = (full.float() * single(grid.unit)).double()
        magnitudes = torch.tensor(grid.element.magnitudes(), device="cpu")
        exact, plain = narrow(torch.outer(magnitudes, full), dtype), full.float()
        factors = torch.full_like(plain, math.nan)
        for toward in (math.inf, -math.inf, None):
            tried = plain
            if toward is not None:
                tried = torch.from_numpy(np.nextafter(plain.numpy(), f32(toward)))
            products = torch.outer(magnitudes.float(), tried)
            factors = tried.where((products.to(dtype) == exact).all(0), factors)
        if torch.equal(factors, plain):
            tables.append(None)
            continue
        table = np.zeros(2**12, f32)
        table[scales.float().numpy().view(np.uint32) >> 20] = factors.numpy()
        tables.append(table)
    return tables
