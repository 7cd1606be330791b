"""The worst block of a weight beside its parent's values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qgate.checkpoints.compute import DecodedRows, SourceRows
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.record import WorstBlock

WIDTH = 64
"""Columns of a block that are kept, around the element with the most error."""


def worst_block(name: str, weight: DecodedRows, parent: SourceRows) -> WorstBlock | None:
    """Find the block with the most error, what is not finite first; None for an empty weight.

    Of a block with very many rows, a part counts as a block.
    """
    most, worst = -1.0, None
    for start, stop in weight.spans():
        chunk = weight.rows(start, stop)
        source = parent[start:stop].float()
        if not source.numel():
            continue
        squares = (chunk.values() - source).square().nan_to_num(torch.inf)
        of_tiles = chunk.in_tiles(squares).sum((1, 3))
        if float(of_tiles.max()) <= most:
            continue
        most = float(of_tiles.max())
        tile = divmod(int(of_tiles.argmax()), of_tiles.shape[1])
        worst = _cut(name, chunk, source, start, tile)
    return worst


def _cut(
    name: str, weight: QuantizedWeight, parent: Tensor, start: int, tile: tuple[int, int]
) -> WorstBlock:
    """Keep some columns of a block in the row of its largest error; `start` is its first row."""
    height, width = min(weight.tile[0], len(parent)), weight.tile[1]
    rows = slice(tile[0] * height, min(tile[0] * height + height, len(parent)))
    numbers = torch.arange(parent.shape[1]) if weight.order is None else weight.order
    columns = numbers[tile[1] * width : tile[1] * width + width]
    values, source = weight.values()[rows, columns], parent[rows, columns]
    squares = (values - source).square().nan_to_num(torch.inf)
    row, column = divmod(int(squares.argmax()), squares.shape[1])
    first = min(max(column - WIDTH // 2, 0), max(squares.shape[1] - WIDTH, 0))
    of = slice(first, min(first + WIDTH, squares.shape[1]))
    energy = float(source.square().sum(dtype=torch.float64)) or 1.0
    error = float((values - source).square().sum(dtype=torch.float64)) / energy
    return WorstBlock(
        name=name,
        row=start + rows.start + row,
        column=int(columns[first]),
        scale=_finite(weight.scales[tile].reshape(1))[0],
        error=error if math.isfinite(error) else None,
        values=_finite(values[row, of]),
        parent=_finite(source[row, of]),
    )


def _finite(values: Tensor) -> tuple[float | None, ...]:
    return tuple(value if math.isfinite(value) else None for value in values.tolist())
