"""Tiles: which rows and columns share a scale, as it is declared, or as shapes of scales tell."""

from __future__ import annotations

import math

from torch import Tensor

from qgate.errors import QgateError

Tile = tuple[int, int]
USUAL = 128
"""The side of a tile that is tried first where nothing is declared."""
SIDES = (USUAL, 16, 32, 64, 256, 512)


def fit_tile(
    scales: Tensor,
    rows: int,
    columns: int,
    name: str,
    whole: tuple[int, ...] = (),
    tile: Tile | None = None,
) -> tuple[Tensor, Tile]:
    """Find the tile that scales of some shape belong to, and return them as rows of tiles.

    whole   the shape of all scales of a weight with so many rows, where these are some of them
    tile    the tile that they have, if they are of tiles
    """
    shape = whole or tuple(scales.shape)
    if math.prod(shape) == 1:
        covers = tile is not None and tile[0] >= rows and tile[1] >= columns
        return scales.reshape(1, 1), tile if tile is not None and covers else (rows, columns)
    if shape == (rows,):
        return scales.reshape(-1, 1), (1, columns)
    shaped = scales.reshape(-1, shape[-1])
    down, across = math.prod(shape[:-1]), shape[-1]
    if (down, across) == (rows, 1):
        return shaped, (1, columns)
    if tile is not None and counts(rows, columns, tile) == (down, across):
        return shaped, tile
    if tile is not None and counts(rows, columns, tile) == (across, down):
        raise QgateError(
            f"its {down} x {across} scales are transposed: a weight of {rows} x {columns} has "
            f"{across} x {down} of them"
        )
    sides = side_of(rows, down), side_of(columns, across)
    if None in sides:
        raise QgateError(
            f"{name}: scales of shape {shape} do not fit a weight of {rows} x {columns}."
        )
    return shaped, (sides[0] or 1, sides[1] or 1)


def counts(rows: int, columns: int, tile: Tile) -> tuple[int, int]:
    """Return how many tiles a matrix has down and across."""
    return -(-rows // tile[0]), -(-columns // tile[1])


def side_of(length: int, count: int) -> int | None:
    """Return the whole share (or the power of two) that divides a length into so many tiles."""
    return min(_sides(length, count), key=lambda side: side * count, default=None)


def _sides(length: int, count: int) -> list[int]:
    """List the sides by which so many tiles cover a length: the usual, powers of two, a share."""
    if count < 1 or count > length:
        return []
    sides = [side for side in SIDES if -(-length // side) == count]
    return list(dict.fromkeys([*sides, length // count])) if length % count == 0 else sides


def declared_tile(shape: tuple[int, ...], scales: tuple[int, ...], tile: Tile) -> Tile:
    """Return the tile that is declared; an error if scales of this shape cannot be its."""
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    if len(shape) > 2 and shape[-2] % tile[0]:
        raise QgateError(
            f"matrices of {shape[-2]} x {columns} that are stacked are not whole tiles of "
            f"{tile[0]} x {tile[1]}: such weights cannot be read"
        )
    needed = counts(rows, columns, tile)
    stored = math.prod(scales[:-1]), scales[-1]
    if stored == needed:
        return tile
    turned = ", and are transposed" if stored[::-1] == needed else ""
    raise QgateError(
        f"its {stored[0]} x {stored[1]} scales do not fit tiles of {tile[0]} x {tile[1]} as the "
        f"recipe declares{turned}: a weight of {rows} x {columns} has {needed[0]} x {needed[1]} "
        "of them"
    )


def likely_tiles(shape: tuple[int, ...], scales: tuple[int, ...]) -> list[Tile]:
    """List the tiles that scales may have where nothing is declared, square ones first."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    down, across = math.prod(scales[:-1]), scales[-1]
    # Sides that are not shorter than the weight cut it alike.
    tiles: dict[Tile, Tile] = {}
    listed = [(a, b) for a in _sides(rows, down) for b in _sides(columns, across)]
    for tile in sorted(listed, key=lambda tile: tile[0] != tile[1]):
        tiles.setdefault((min(tile[0], rows), min(tile[1], columns)), tile)
    return list(tiles.values())
