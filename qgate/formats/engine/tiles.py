"""Tiles and listed groups of a tensor as rows of a matrix, and back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qgate.formats.groups import Groups, rows_of

Pair = tuple[int, int]


def fitted(shape: torch.Size, tile: Pair) -> tuple[Pair, Pair]:
    """Return a tile no larger than the tensor, and the number of tiles down and across."""
    height, width = shape[-2:]
    rows, columns = max(min(tile[0], height), 1), max(min(tile[1], width), 1)
    return (rows, columns), (-(-height // rows), -(-width // columns))


def split_tiles(x: Tensor, tile: Pair) -> Tensor:
    """Return each tile as [tile, element, 1], short ones filled with zeros."""
    (rows, columns), (down, across) = fitted(x.shape, tile)
    short = (0, across * columns - x.shape[-1], 0, down * rows - x.shape[-2])
    filled, matrices = torch.nn.functional.pad(x, short), math.prod(x.shape[:-2])
    tiles = filled.reshape(matrices, down, rows, across, columns).transpose(2, 3)
    return tiles.reshape(matrices * down * across, rows * columns, 1)


def join_tiles(t: Tensor, shape: torch.Size, tile: Pair) -> Tensor:
    """Undo `split_tiles` of a tensor of this shape."""
    (rows, columns), (down, across) = fitted(shape, tile)
    *leading, height, width = shape
    tiles = t.view(math.prod(leading), down, across, rows, columns)
    filled = tiles.transpose(2, 3).reshape(*leading, down * rows, across * columns)
    return filled[..., :height, :width].contiguous()


def split_groups(x: Tensor, groups: Groups) -> Tensor:
    """Return the elements of each group as [group, element, 1], short ones filled with zeros."""
    moved = x.movedim(groups.axes, (-2, -1))
    table, _ = rows_of(groups, *moved.shape[-2:])
    flat = moved.reshape(math.prod(moved.shape[:-2]), math.prod(moved.shape[-2:]))
    filled = torch.nn.functional.pad(flat, (0, 1))
    return filled[:, torch.from_numpy(table).to(x.device)].reshape(-1, table.shape[1], 1)


def join_groups(t: Tensor, shape: torch.Size, groups: Groups) -> Tensor:
    """Undo `split_groups` of a tensor of this shape."""
    row, column = groups.along(len(shape))
    leading = [size for axis, size in enumerate(shape) if axis not in (row, column)]
    _, places = rows_of(groups, shape[row], shape[column])
    flat = t.reshape(math.prod(leading), -1)[:, torch.from_numpy(places).to(t.device)]
    matrices = flat.reshape(*leading, shape[row], shape[column])
    return matrices.movedim((-2, -1), groups.axes).contiguous()
