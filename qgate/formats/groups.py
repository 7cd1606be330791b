"""Layouts of scales as data: functions from the index of an element to its group.

Kernels that compute in fragments of tensor cores give each thread or warp its own scale, so the
elements that share one lie neither along an axis nor in a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from qgate.errors import QgateError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
MOST_EMPTY = 2**16
"""Groups without an element that a layout may number, as kernels number those of padding."""


@dataclass(frozen=True)
class Groups:
    """Which elements share a scale: a function from the index in a matrix to the group.

    name  words for messages, after "one per group of"
    of    function from arrays of rows and columns to an array of the numbers of their groups, which
          count from 0 in every matrix
    axes  the axes that rows and columns run along; each index of the others is another matrix

    Scales have the shape of the other axes, and one entry for each number of a group.
    """

    name: str
    of: Callable[[Integers, Integers], Any]
    axes: tuple[int, int] = (-2, -1)

    def numbers(self, rows: int, columns: int) -> Integers:
        """Return the number of the group of each element of a matrix."""
        row, column = (np.asarray(index, np.int64) for index in np.indices((rows, columns)))
        declared = np.asarray(self.of(row, column))
        if not np.issubdtype(declared.dtype, np.integer):
            raise QgateError(
                f"groups {self.name!r} gives {declared.dtype} numbers for rows and columns; give "
                "whole numbers, such as lambda row, column: row // 32."
            )
        numbers = np.broadcast_to(declared, row.shape).astype(np.int64)
        low, high = int(numbers.min(initial=0)), int(numbers.max(initial=0))
        if low < 0 or high > numbers.size + MOST_EMPTY:
            raise QgateError(
                f"groups {self.name!r} numbers the groups of a matrix of {rows}x{columns} from "
                f"{low:,} to {high:,}; count them from 0, without gaps."
            )
        return numbers

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor."""
        leading, size = self._sizes(shape)
        return *leading, rows_of(self, *size)[0].shape[0]

    def width(self, shape: Sequence[int]) -> int:
        """Return the elements of the largest group of a tensor."""
        return int(rows_of(self, *self._sizes(shape)[1])[0].shape[1])

    def split(self, x: Floats) -> Floats:
        """Return the elements of each group as a row, short ones filled with zeros."""
        leading, size = self._sizes(x.shape)
        table, _ = rows_of(self, *size)
        flat = np.moveaxis(x, self.axes, (-2, -1)).reshape(math.prod(leading), math.prod(size))
        filled = np.concatenate([flat, np.zeros((len(flat), 1))], axis=1)
        return filled[:, table].reshape(-1, table.shape[1])

    def join(self, rows: Floats, shape: Sequence[int]) -> Floats:
        """Undo `split` of a tensor of this shape."""
        leading, size = self._sizes(shape)
        _, places = rows_of(self, *size)
        flat = rows.reshape(math.prod(leading), -1)[:, places]
        return np.moveaxis(flat.reshape(*leading, *size), (-2, -1), self.axes)

    def apply(self, x: Floats, function: Callable[[Floats], Floats]) -> Floats:
        """Apply a function of rows, one for each group, to a tensor."""
        return self.join(function(self.split(x)), x.shape)

    def along(self, dims: int) -> tuple[int, int]:
        """Return the axes as numbers from 0, for a tensor of that many dimensions."""
        if dims < 2 or not all(-dims <= axis < dims for axis in self.axes):
            raise QgateError(
                f"groups {self.name!r} lie over axes {self.axes[0]} and {self.axes[1]}; a tensor "
                f"of {dims} dimensions does not have them."
            )
        return self.axes[0] % dims, self.axes[1] % dims

    def _sizes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Return the lengths of the other axes, and of rows and columns."""
        row, column = self.along(len(shape))
        leading = tuple(size for axis, size in enumerate(shape) if axis not in (row, column))
        return leading, (shape[row], shape[column])

    def __repr__(self) -> str:
        return f"<{self.name}>"


@lru_cache(64)
def rows_of(groups: Groups, rows: int, columns: int) -> tuple[Integers, Integers]:
    """Return the elements of each group as a table, and where in it each element lies.

    Elements are numbered row by row; beyond the last one of a group the table has rows * columns.
    """
    numbers = groups.numbers(rows, columns).reshape(-1)
    counts = np.bincount(numbers) if len(numbers) else np.zeros(0, np.int64)
    width = int(counts.max(initial=1))
    order = np.argsort(numbers, kind="stable")
    first = np.cumsum(counts) - counts
    places = np.empty(len(numbers), np.int64)
    places[order] = numbers[order] * width + np.arange(len(numbers)) - first[numbers[order]]
    table = np.full(len(counts) * width, len(numbers))
    table[places] = np.arange(len(numbers))
    return table.reshape(len(counts), width), places


def as_groups(declared: Any) -> Groups:
    """Return the groups that a function declares, or as they are."""
    if isinstance(declared, Groups):
        return declared
    if not callable(declared):
        raise TypeError(
            f"groups is a function from rows and columns to numbers of groups, or a "
            f"qgate.formats.groups.Groups, not {declared!r}."
        )
    return Groups(getattr(declared, "__name__", type(declared).__name__), declared)


# Layouts of SageAttention, from its sageattention/triton/quant_per_thread.py and quant.py: rows are
# tokens, columns the dimensions of a head. A warp multiplies fragments of 16 queries and 8 keys.


@cache
def warps(tokens: int) -> Groups:
    """Return one group for the consecutive tokens of each warp, or of each block."""
    return Groups(f"{tokens} tokens", lambda row, _: row // tokens)


@cache
def query_threads(tokens: int = 32) -> Groups:
    """Return eight groups for each warp: a thread holds every eighth query of its warp."""
    return Groups(f"every eighth token of {tokens}", lambda row, _: row // tokens * 8 + row % 8)


@cache
def key_threads(tokens: int = 64) -> Groups:
    """Return four groups for each warp: a thread holds two neighbors of every eight keys."""
    return Groups(
        f"two of every eight tokens of {tokens}",
        lambda row, _: row // tokens * 4 + row % 8 // 2,
    )


KNOWN = (
    *(warps(tokens) for tokens in (2, 4, 8, 16, 32, 64, 128)),
    *(query_threads(tokens) for tokens in (16, 32)),
    *(key_threads(tokens) for tokens in (64, 128)),
)
"""Layouts that kernels have, each of which may be taken for another."""
