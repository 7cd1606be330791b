"""The best scale and the nearest rows of a codebook for many blocks, in products of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from qgate.formats._vectors import HALF, STEPS, VectorRows
from qgate.formats._work import DOUBLE

_BLOCKS = 32
"""Blocks whose distances to all rows are in memory at once."""


def search(fmt: VectorRows, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return elements and ratios of float64 blocks, their first scales and the codes of tiles."""
    parts = [_search(fmt, part) for part in blocks.split(_BLOCKS)]
    elements, ratios, first, codes = (torch.cat(part) for part in zip(*parts, strict=True))
    return elements, ratios, first, codes


def _search(fmt: VectorRows, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Try scales in the order of what they cost at least, until no other can cost less."""
    tried, count = fmt.tried(), fmt.size // fmt.tile
    factors = blocks.new_tensor([fmt.factors[code] for code in tried])
    m = _largest(blocks) / fmt.reach * fmt.share
    m = m.abs() if fmt.book else m
    d = HALF.nearest(m / factors[0].abs())
    scales = HALF.nearest(m * factors) if fmt.is_whole else d * factors
    unit = scales.where(scales != 0, d)
    unit = unit.where(unit != 0, 1.0).repeat_interleave(count, 0)
    is_zero = (scales == 0).repeat_interleave(count, 0)
    tiles = blocks.reshape(-1, fmt.tile)
    ratios = tiles[:, None] / unit[:, :, None]
    end, weights = 2 * fmt.reach, unit.square()
    r = ratios.clamp(-end, end).mul_(STEPS).round_()
    errors = r - fmt.element.nearest(r / STEPS).mul_(STEPS)
    least = errors.where(~is_zero[:, :, None], r).square_().sum(2) * weights
    least = least.masked_fill_((ratios.abs() > end).any(2), torch.inf)
    least[:, 0] = least[:, 0].where(least.isfinite().any(1), 0.0)
    least, order = least.sort(1)
    best, chosen = tiles.new_full((len(tiles),), torch.inf), order[:, 0].clone()
    elements = torch.zeros_like(tiles)
    for rank in range(len(tried)):
        open_tiles = (least[:, rank] <= best).nonzero().squeeze(1)
        if not len(open_tiles):
            break
        column = order[open_tiles, rank]
        at = open_tiles, column
        rows, squares = _rows(fmt, r[at])
        squares = squares.where(~is_zero[at][:, None], r[at].square())
        cost, before = squares.sum(1) * weights[at], best[open_tiles]
        better = (cost < before) | ((cost == before) & (column < chosen[open_tiles]))
        changed = open_tiles[better]
        best[changed], chosen[changed] = cost[better], column[better]
        elements[changed] = rows[better]
    all_tiles = torch.arange(len(tiles), device=tiles.device)
    exact = ratios[all_tiles, chosen].view_as(blocks)
    first = scales.gather(1, chosen[:, None]) if fmt.is_whole else d
    codes = torch.tensor(tried, dtype=torch.uint8, device=tiles.device)[chosen]
    return elements.view_as(blocks), exact, first, codes.view(-1, count)


def _largest(blocks: Tensor) -> Tensor:
    """Return the first element of the largest magnitude of each block."""
    sizes = blocks.abs()
    is_largest = sizes == sizes.amax(1, keepdim=True)
    is_first = is_largest & (is_largest.cumsum(1) == 1)
    return blocks.where(is_first, 0.0).sum(1, keepdim=True)


def _rows(fmt: VectorRows, r: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest elements to ratios, and the squares of their errors."""
    elements, errors = _unshifted(fmt, r - fmt.shift * STEPS)
    elements += fmt.shift
    if fmt.shift:
        low_elements, low_errors = _unshifted(fmt, r + fmt.shift * STEPS)
        high, low = (part.view(-1, fmt.shifted).sum(1) for part in (errors, low_errors))
        is_low = (low < high).repeat_interleave(fmt.shifted).view(r.shape)
        elements = (low_elements - fmt.shift).where(is_low, elements)
        errors = low_errors.where(is_low, errors)
    return elements, errors


def _unshifted(fmt: VectorRows, r: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest elements of rows; keys are distances with the row's number below."""
    width = fmt.rows().shape[1]
    table = DOUBLE.table((fmt, "rows"), fmt.rows().ravel().tolist, r.device).view(-1, width)
    count = len(table)
    signs = torch.where(r < 0, -1.0, 1.0) if fmt.signs else torch.ones_like(r)
    signs = signs.to(r.dtype)
    if fmt.signs == "even":
        eights = signs.view(-1, 8)
        places = torch.arange(8, dtype=r.dtype, device=r.device)
        smallest = (r.abs().view(-1, 8) * 8 + places).argmin(1, keepdim=True)
        flips = eights.prod(1, keepdim=True) * eights.gather(1, smallest)
        signs = eights.scatter(1, smallest, flips).view(r.shape)
    target = (r * signs).view(-1, width)
    numbers = torch.arange(count, dtype=r.dtype, device=r.device)
    keys = torch.addmm(
        table.square().sum(1) * STEPS * count + numbers, target, table.T * (-2 * count)
    ).amin(1)
    nearest = table.index_select(0, keys.long() & (count - 1))
    errors = (target - nearest * STEPS).square_().view(r.shape)
    return nearest.view(r.shape) * signs, errors
