"""Sums over cells of magnitudes, within which no scale of a sweep tells two numbers apart.

All numbers of a cell round to the same value at every level, and lie on the same side of it. So
their count, mean, spread and ends give every sum of errors, and the numbers need one pass only.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from qgate.formats import ElementFormat
from qgate.scales.rounding import first_number
from qgate.stats import Counts, Values, serial
from qgate.stats.summary import Floats, Ints
from qgate.stats.threads import in_order
from qgate.sweeps._sums import CellEnds, Folded

_FEW = 2**16  # numbers that are rounded one by one sooner than edges are found
_MOST_EDGES = 2**18  # formats of 16 bits would have a million
_LEAST = 5e-324


@dataclass(frozen=True)
class ScaleGroup:
    """Finite numbers of a chunk whose blocks have the scale 2**exponent; None without blocks."""

    exponent: int | None
    values: npt.NDArray[np.floating]

    def relative(self, values: npt.NDArray[np.floating]) -> Floats:
        """Return values as float64 numbers relative to the scale."""
        wide = values.astype(np.float64)
        return wide if self.exponent is None else np.ldexp(wide, -self.exponent)


def are_worth_cells(summary: Counts | Values) -> bool:
    return isinstance(summary, Values) and summary.n > _FEW


def cell_edges(fmt: ElementFormat, scales: Floats) -> Floats | None:
    """Return the magnitudes at which cells begin; None for too many, or where no edge is sure."""
    sizes = fmt.magnitudes()
    if 2 * len(sizes) * len(scales) > _MOST_EDGES:
        return None
    column = scales[:, None]
    with np.errstate(over="ignore"):
        codes = sizes * column
        double = 2 * fmt.saturates_from() * column
    beyond = fmt.saturates_from()

    def reaches(x: Floats) -> npt.NDArray[np.bool_]:
        """Tell where a number rounds to a code, or to one above it."""
        with serial():
            return np.asarray(fmt.nearest(torch.from_numpy(x / column)).numpy() >= sizes[1:])

    rounded = first_number(reaches, codes[:, :-1], codes[:, 1:])
    saturated = first_number(lambda x: x / column >= beyond, double / 4, double)
    if rounded is None or saturated is None:
        return None
    parts = (np.array([_LEAST]), codes[:, 1:], rounded, saturated, fmt.min_normal * scales)
    edges = np.unique(np.concatenate([part.reshape(-1) for part in parts]))
    return edges if np.isfinite(edges).all() and edges[0] > 0 else None


class CellEdges:
    """Edges of cells by the exponent of a scale, each found once; None where there are none.

    `scales_of` returns the scales of all levels relative to that exponent, and no cell has numbers
    on both sides of `beyond`.
    """

    def __init__(
        self,
        fmt: ElementFormat,
        scales_of: Callable[[int | None], Floats],
        beyond: float = math.inf,
    ) -> None:
        self._fmt, self._scales_of, self._beyond = fmt, scales_of, beyond
        self._edges: dict[bytes, Floats | None] = {}
        self._lock = threading.Lock()

    def of(self, exponent: int | None) -> Floats | None:
        """Return the edges for numbers relative to 2**exponent."""
        scales = self._scales_of(exponent)
        key = scales.tobytes()
        with self._lock:
            if key not in self._edges:
                self._edges[key] = cell_edges(self._fmt, scales)
            edges = self._edges[key]
        if edges is None or self._beyond == math.inf:
            return edges
        beyond = np.ldexp(math.nextafter(self._beyond, math.inf), -(exponent or 0))
        return np.union1d(edges, [beyond])


@dataclass(frozen=True)
class _CellSums:
    """Sums of the cells that occur in a group; `offsets` are of distances from the centers."""

    exponent: int | None
    room: int
    cells: Ints
    counts: Floats
    centers: Floats
    offsets: Floats
    spreads: Floats
    least: Floats
    greatest: Floats


def _sums_of(group: ScaleGroup, edges_of: CellEdges | None) -> ScaleGroup | _CellSums:
    """Sort a group and sum each cell, or return it where there are no edges.

    Cells of negative numbers follow those of positive ones.
    """
    edges = None if edges_of is None else edges_of.of(group.exponent)
    if edges is None or not len(group.values):
        return group
    values = group.relative(np.sort(group.values))
    negative = int(np.searchsorted(values, 0.0))
    above, below = values[negative:], -values[:negative][::-1]
    sizes = np.concatenate([above, below])
    starts = np.concatenate(
        [
            [0],
            np.searchsorted(above, edges),
            [len(above)],
            np.searchsorted(below, edges) + len(above),
        ]
    )
    counts = np.diff(starts, append=len(sizes))
    cells = np.flatnonzero(counts)
    starts, counts = starts[cells], counts[cells]
    # About the median: it is within one deviation of the mean, so no digits are lost.
    centers = sizes[starts + counts // 2]
    least, greatest = sizes[starts], sizes[starts + counts - 1]
    sizes -= np.repeat(centers, counts)
    offsets = np.add.reduceat(sizes, starts)
    squares = np.add.reduceat(np.multiply(sizes, sizes, out=sizes), starts)
    numbers = counts.astype(np.float64)
    spreads = np.maximum(squares - offsets * offsets / numbers, 0.0)
    room = 2 * (len(edges) + 1)
    sums = (cells, numbers, centers, offsets, spreads, least, greatest)
    return _CellSums(group.exponent, room, *sums)


class CellTable:
    """Sums of every cell of one scale, to which those of groups are added in order."""

    def __init__(self, room: int) -> None:
        self._counts, self._centers, self._offsets, self._spreads = np.zeros((4, room))
        self._least, self._greatest = np.full(room, np.inf), np.zeros(room)

    def add(self, part: _CellSums) -> None:
        cells, new = part.cells, part.counts
        old = self._counts[cells]
        centers = np.where(old > 0, self._centers[cells], part.centers)
        offsets = part.offsets + new * (part.centers - centers)
        before = self._offsets[cells]
        apart = offsets / new - before / np.maximum(old, 1.0)
        self._spreads[cells] += part.spreads + apart * apart * (old * new / (old + new))
        self._centers[cells], self._offsets[cells] = centers, before + offsets
        self._counts[cells] = old + new
        self._least[cells] = np.minimum(self._least[cells], part.least)
        self._greatest[cells] = np.maximum(self._greatest[cells], part.greatest)

    def folded(self, exponent: int | None) -> Folded:
        """Return the cells as magnitudes: the mean of each stands for its numbers."""
        used = np.flatnonzero(self._counts)
        counts, least, greatest = self._counts[used], self._least[used], self._greatest[used]
        sizes = np.clip(self._centers[used] + self._offsets[used] / counts, least, greatest)
        below = used >= len(self._counts) // 2
        order = np.lexsort((sizes, used % (len(self._counts) // 2)))
        parts = (sizes, np.where(below, 0.0, counts), np.where(below, counts, 0.0))
        sizes, positive, negative = (part[order] for part in parts)
        cells = CellEnds(self._spreads[used][order], least[order], greatest[order])
        return Folded(sizes, positive, negative, exponent, cells)


def in_cells(
    chunks: Iterable[torch.Tensor],
    groups_of: Callable[[torch.Tensor], Iterable[ScaleGroup]],
    edges: CellEdges | None,
) -> Iterator[Folded]:
    """Sum all chunks by cells, on as many threads as torch uses, and yield the cells.

    Groups without edges come back number by number.
    """

    def summed(chunk: torch.Tensor) -> list[ScaleGroup | _CellSums]:
        return [_sums_of(group, edges) for group in groups_of(chunk)]

    tables: dict[int | None, CellTable] = {}
    for part in itertools.chain.from_iterable(in_order(summed, chunks)):
        if isinstance(part, ScaleGroup):
            yield from Folded.pieces(part.relative(part.values), part.exponent)
            continue
        if part.exponent not in tables:
            tables[part.exponent] = CellTable(part.room)
        tables[part.exponent].add(part)
    for exponent, table in tables.items():
        yield table.folded(exponent)
