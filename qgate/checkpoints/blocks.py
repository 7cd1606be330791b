"""The worst block of a weight beside its parent's values, and where its scales lie."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.record import WorstBlock

WIDTH = 64
"""Columns of a block that are kept, around the element with the most error."""


def scale_octaves(scales: Tensor) -> tuple[int, tuple[int, ...]] | None:
    """Count positive scales by their exponent, from the lowest one that there is."""
    positive = scales[scales > 0]
    if not positive.numel():
        return None
    exponents = torch.frexp(positive.float())[1].reshape(-1).long() - 1
    low = int(exponents.min())
    return low, tuple(torch.bincount(exponents - low).tolist())


def worst_block(name: str, weight: QuantizedWeight, parent: Tensor) -> WorstBlock | None:
    """Find the block with the most error, what is not finite first; None for an empty weight."""
    if not weight.elements.numel():
        return None
    most, window, corner = -1.0, (0, 0, 0), (0, 0)
    for start, chunk in weight.chunks():
        source = parent[start : start + len(chunk.elements)].float()
        squares = (chunk.values() - source).square().nan_to_num(torch.inf)
        of_tiles = chunk.in_tiles(squares).sum((1, 3))
        if float(of_tiles.max()) <= most:
            continue
        most = float(of_tiles.max())
        tile_row, tile_column = divmod(int(of_tiles.argmax()), of_tiles.shape[1])
        height, width = min(weight.tile[0], len(squares)), weight.tile[1]
        top, left = tile_row * height, tile_column * width
        inside = squares[top : top + height, left : left + width]
        row, column = divmod(int(inside.argmax()), inside.shape[1])
        first = min(max(column - WIDTH // 2, 0), max(inside.shape[1] - WIDTH, 0))
        stop = min(first + WIDTH, inside.shape[1])
        window = start + top + row, left + first, left + stop
        corner = start + top, left
    return _cut(name, weight, parent, window, corner)


def _cut(
    name: str,
    weight: QuantizedWeight,
    parent: Tensor,
    window: tuple[int, int, int],
    corner: tuple[int, int],
) -> WorstBlock:
    """Keep the columns of a window in one row; `corner` is where its block begins."""
    row, first, stop = window
    height, width = weight.tile
    rows = slice(corner[0], min(corner[0] + height, len(parent)))
    columns = slice(corner[1], corner[1] + width)
    tile = rows.start // min(height, len(parent)), corner[1] // min(width, parent.shape[1])
    values, source = weight.values()[rows, columns], parent[rows, columns].float()
    energy = float(source.square().sum(dtype=torch.float64)) or 1.0
    error = float((values - source).square().sum(dtype=torch.float64)) / energy
    at, of = row - rows.start, slice(first - columns.start, stop - columns.start)
    return WorstBlock(
        name=name,
        row=row,
        column=first,
        scale=_finite(weight.scales[tile].reshape(1))[0],
        error=error if math.isfinite(error) else None,
        values=_finite(values[at, of]),
        parent=_finite(source[at, of]),
    )


def _finite(values: Tensor) -> tuple[float | None, ...]:
    return tuple(value if math.isfinite(value) else None for value in values.tolist())
