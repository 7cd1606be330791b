"""Rows of weights and of their parents, read from files a part at a time.

A tensor is never held whole if it is large: contiguous rows are read ahead by some megabytes, and
columns of a matrix, which lie scattered, in slabs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from qgate.checkpoints.grids import CHUNK, TALL, QuantizedWeight, leading_rows, row_spans
from qgate.checkpoints.packings import NOTHING, decode, decode_parts, tiles_of
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.recipes import Recipe, gptq_zero_offset
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.tiles import Tile, side_of
from qgate.checkpoints.weight_parts import MisfitError, Parts, StoredWeight

SAMPLE = 1 << 25
"""Elements of a large weight that are looked at for the cause of an error."""
SLAB = 192 << 20
"""Bytes of columns that are kept, for which the whole matrix is read."""


class ContiguousRows:
    """Rows of a tensor that lie one after the other in its file, read ahead.

    columns  elements of a row
    ahead    bytes to read at a time, if more than usual
    """

    def __init__(self, checkpoint: Checkpoint, name: str, columns: int, ahead: int = 0) -> None:
        entry = checkpoint.entries[name]
        self._checkpoint, self._name, self._columns = checkpoint, name, columns
        count = math.prod(entry.shape)
        self._rows = count // columns if columns else 0
        row_bytes = max(1, entry.size // max(1, self._rows))
        self._step = max(1, max(ahead, checkpoint.ahead) // row_bytes)
        if not checkpoint.has_spans(name):
            self._step = max(1, self._rows)
        self._start, self._held = 0, torch.empty(0)

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop = rows.start, rows.stop
        if not self._start <= start <= stop <= self._start + len(self._held):
            end = min(max(stop, start + self._step), self._rows)
            first, last = start * self._columns, end * self._columns
            self._held = torch.empty(0)
            read = self._checkpoint.read_span(self._name, first, last)
            # Rows of types that are stored in blocks are bytes.
            self._start, self._held = start, read.reshape(max(0, end - start), -1)
        return self._held[start - self._start : stop - self._start]


class ScatteredRows:
    """Words of rows whose codes lie in words a share of all rows apart, for each row its own.

    The words of a file are read once for each code that they hold.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> None:
        self._height, width = shape
        self._words = ContiguousRows(checkpoint, name, width)

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, height = rows.start, rows.stop, self._height
        pieces = []
        while start < stop:
            end = min(stop, (start // height + 1) * height)
            first = start % height
            pieces.append(self._words[first : first + end - start])
            start = end
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class MatrixColumns:
    """Columns of a matrix in a file, one per row: all of a small matrix, slabs of a large one.

    first  the row of the tensor at which the matrix begins
    """

    def __init__(
        self, checkpoint: Checkpoint, name: str, shape: tuple[int, int], first: int = 0
    ) -> None:
        self._height, self._width = shape
        self._checkpoint, self._name, self._first = checkpoint, name, first
        self._start, self._held = 0, torch.empty(0, 0)

    def __getitem__(self, columns: slice) -> Tensor:
        """Return these columns as rows, as a view of what was read."""
        start, stop = columns.start, columns.stop
        if not self._start <= start <= stop <= self._start + len(self._held):
            self._read(start, stop)
        return self._held[start - self._start : stop - self._start]

    def _read(self, start: int, stop: int) -> None:
        rows = ContiguousRows(self._checkpoint, self._name, self._width)
        entry = self._checkpoint.entries[self._name]
        # Packed elements take a byte each when they are read.
        itemsize = max(1, entry.size // max(1, math.prod(entry.shape)))
        stop = min(max(stop, start + SLAB // max(1, self._height * itemsize)), self._width)
        slab = torch.empty(0)
        self._held = torch.empty(0, 0)
        step = max(1, self._checkpoint.ahead // max(1, self._width * itemsize))
        for row in range(0, self._height, step):
            end = min(row + step, self._height)
            part = rows[self._first + row : self._first + end][:, start:stop]
            if row == 0:
                slab = torch.empty(stop - start, self._height, dtype=part.dtype)
            # Turned by itself first: torch does that in blocks.
            slab[:, row:end] = part.T.contiguous()
        self._start, self._held = start, slab


class WeightRows:
    """Rows of a quantized weight, read and decoded when they are asked for.

    A weight whose packing says nothing about rows is decoded whole. `choice` is the number of its
    tile among those that its scales fit, where the recipe does not declare one.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        weight: StoredWeight,
        recipe: Recipe = NOTHING,
        choice: int = 0,
    ) -> None:
        self._checkpoint, self._weight = checkpoint, weight
        self._bits = recipe.bits_of(weight.name.removesuffix(".weight"))
        self._is_symmetric = recipe.zero is not None and self._bits == recipe.bits
        weight.check_complete()
        self.choices = tiles_of(weight, recipe)
        self._tile: Tile | None = self.choices[choice] if self.choices else None
        assert weight.packing is not None
        packing = weight.packing
        self._by_rows = [ending for ending in packing.by_rows if ending in weight.parts]
        self._by_columns = [ending for ending in packing.by_columns if ending in weight.parts]
        self._whole: QuantizedWeight | None = None
        self._readers: dict[str, ContiguousRows | MatrixColumns | ScatteredRows] = {}
        self._constant: dict[str, Tensor] = {}
        self._units: dict[str, tuple[int, int]] = {}
        listed = (*self._by_rows, *self._by_columns)
        self._rows = self._count(listed[0]) if listed else 0
        if packing.count_rows is not None:
            self._rows = packing.count_rows(checkpoint, weight.parts)
            listed = listed if self._rows else ()
        if not listed:
            whole = decode(checkpoint, weight, recipe)
            self._whole = replace(whole, is_symmetric=self._is_symmetric)
            self._rows = len(self._whole.elements)
            return
        for ending, entry in weight.parts.items():
            units = self._share(ending)
            if units is None:
                self._constant[ending] = checkpoint.read(entry.name)
                continue
            self._units[ending] = units
            count = self._count(ending)
            if ending in packing.scattered:
                words = entry.shape[0], entry.shape[1]
                self._readers[ending] = ScatteredRows(checkpoint, entry.name, words)
            elif ending in self._by_columns:
                shape = math.prod(entry.shape) // count, count
                self._readers[ending] = MatrixColumns(checkpoint, entry.name, shape)
            else:
                width = math.prod(entry.shape) // count
                self._readers[ending] = ContiguousRows(checkpoint, entry.name, width)

    def _count(self, ending: str) -> int:
        """Return the length of a tensor along the axis that stands for rows of the weight."""
        shape = self._weight.parts[ending].shape
        if not shape:
            return 1
        if ending in self._by_columns:
            return shape[-1]
        return math.prod(shape[:-1]) if len(shape) > 1 else shape[0]

    def _share(self, ending: str) -> tuple[int, int] | None:
        """Return how many units of a tensor belong to how many rows; None if all belong to all."""
        entry = self._weight.parts[ending]
        if ending not in self._by_rows and ending not in self._by_columns:
            return None
        assert self._weight.packing is not None
        if ending in self._weight.packing.scattered:
            ending = self._by_rows[0]
            entry = self._weight.parts[ending]
        count, rows = self._count(ending), self._rows
        if math.prod(entry.shape) <= 1 or count <= 1 or rows < 1:
            return None
        if count >= rows:
            return (count // rows, 1) if count % rows == 0 else None
        if entry.dtype == "I32" and self._bits == 3:
            return 3, 32
        if entry.dtype == "I32":
            side = _words_side(rows, count)
        elif self._tile is not None and -(-rows // self._tile[0]) == count:
            side = self._tile[0]
        else:
            side = side_of(rows, count)
        return None if side is None else (1, side)

    @cached_property
    def _top(self) -> QuantizedWeight:
        """Decode the first rows, which tell the element format and the columns."""
        return self.rows(0, min(self._rows, self.together))

    @property
    def together(self) -> int:
        """Return how many rows are decoded together."""
        if self._whole is not None:
            return 1
        return math.lcm(1, *(r for _, r in self._units.values() if r <= TALL))

    @property
    def shape(self) -> tuple[int, int]:
        """Return its rows and columns."""
        return self._rows, self._top.shape[1]

    @property
    def element(self) -> str:
        return self._top.element

    @property
    def tile(self) -> tuple[int, int]:
        return self._top.tile

    @property
    def has_zero_points(self) -> bool:
        return self._top.zero_points is not None

    def spans(self) -> Iterator[tuple[int, int]]:
        """Split its rows into spans that can be decoded one by one."""
        return row_spans(self.shape, self.tile[0], self.together)

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """Read and decode rows that `spans` names."""
        if self._whole is not None:
            return self._whole.rows(start, stop)
        tensors = dict(self._constant)
        for ending, reader in self._readers.items():
            units, rows = self._units[ending]
            first, last = start * units // rows, -(-stop * units // rows)
            part = reader[first:last]
            one_axis = len(self._weight.parts[ending].shape) == 1
            if isinstance(reader, MatrixColumns):
                part = part.T
            tensors[ending] = part.reshape(-1) if one_axis else part
        shapes = {ending: entry.shape for ending, entry in self._weight.parts.items()}
        offset = gptq_zero_offset(self._checkpoint.configuration)
        name, rows = self._weight.name, self._rows
        parts = Parts(
            name,
            tensors,
            self._bits,
            shapes,
            rows,
            start=start,
            zero_offset=offset,
            tile=self._tile,
        )
        return replace(decode_parts(self._weight, parts), is_symmetric=self._is_symmetric)

    @property
    def sampled(self) -> int:
        """Return how many leading rows `sample` has: all of a weight that is not large."""
        unit = self.together if self.tile[0] <= TALL else self.tile[0]
        return leading_rows(self.shape, unit, SAMPLE)

    def sample(self) -> QuantizedWeight:
        """Decode leading rows, as many as fit into memory."""
        return self.rows(0, self.sampled)


def common_spans(a: WeightRows, b: WeightRows) -> Iterator[tuple[int, int]]:
    """Split the rows of two weights of one shape into spans that both can be decoded by."""
    rows, columns = a.shape
    heights = [weight.tile[0] for weight in (a, b)]
    low = [height for height in heights if height <= TALL]
    unit = math.lcm(1, a.together, b.together, *low)
    tall = [height for height in heights if height > TALL]
    ends = sorted({rows, *(row for height in tall for row in range(height, rows, height))})
    step = max(1, CHUNK // max(1, columns) // unit) * unit
    start = 0
    for end in ends:
        for first in range(start, end, step):
            yield first, min(first + step, end)
        start = end


def _words_side(rows: int, count: int) -> int | None:
    """Return how many rows have their integers in one word of 32 bits."""
    return next((side for side in (8, 4, 16, 2) if -(-rows // side) == count), None)


class ParentRows:
    """Rows of the parent's tensors in the order of the child's rows.

    names are those of a match: one tensor, or several whose rows follow one another.
    """

    def __init__(
        self, parent: Checkpoint, match: ParentMatch, rows: int, columns: int, ahead: int = 0
    ) -> None:
        entries = [parent.entries[name] for name in match.names]
        count = sum(math.prod(entry.shape) for entry in entries)
        if count != rows * columns or any(math.prod(e.shape) % max(1, columns) for e in entries):
            shapes = " and ".join(str(entry.shape) for entry in entries)
            raise MisfitError(
                f"{', '.join(match.names)} of the parent has shape {shapes}, and the child's "
                f"weight {rows} x {columns}."
            )
        self._parts: list[tuple[int, ContiguousRows | MatrixColumns]] = []
        first = 0
        for entry in entries:
            length = math.prod(entry.shape) // max(1, columns)
            turned = len(entry.shape) == 3 and entry.shape[-1] != columns
            if match.transposed and len(entry.shape) == 2:
                shape = entry.shape[0], entry.shape[1]
                self._parts.append((first, MatrixColumns(parent, entry.name, shape)))
            elif turned and entry.shape[1] == columns:
                height, width = entry.shape[1:]
                self._parts += [
                    (
                        first + number * width,
                        MatrixColumns(parent, entry.name, (height, width), number * height),
                    )
                    for number in range(entry.shape[0])
                ]
            else:
                self._parts.append((first, ContiguousRows(parent, entry.name, columns, ahead)))
            first += length
        self._ends = [*(start for start, _ in self._parts[1:]), first]

    def __getitem__(self, rows: slice) -> Tensor:
        pieces = []
        for (first, reader), end in zip(self._parts, self._ends, strict=True):
            start, stop = max(rows.start, first), min(rows.stop, end)
            if start < stop:
                pieces.append(reader[start - first : stop - first])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
