"""Figures of one quantized weight: its error beside that of an ideal quantizer, and its scales.

The ideal quantizer has the same elements and tiles, and scales made from the parent. Codes that are
nearest to the parent at the stored scales tell faults of codes from faults of scales.

A weight is measured in chunks that stay in the cache, in memory that is used again. A tile that is
taller than a chunk needs its extremes first: the rows of the parent are asked for twice then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from qgate.checkpoints.grids import CHUNK, TALL, QuantizedWeight, widen
from qgate.checkpoints.ideal import (
    Extremes,
    element_range,
    ideal_scales,
    round_in_place,
    round_to,
)
from qgate.checkpoints.record import ScaleFigures, WeightFigures
from qgate.checkpoints.scratch import Scratch
from qgate.formats import get

Array = np.ndarray[Any, Any]
PER_DB = 10.0
RATIOS = 1 << 20
"""Scales of one weight that are compared with ideal ones, at most about."""


class DecodedRows(Protocol):
    """A quantized weight, in memory or in a file, whose rows are decoded span by span."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def tile(self) -> tuple[int, int]: ...
    @property
    def element(self) -> str: ...
    @property
    def has_zero_points(self) -> bool: ...
    def spans(self) -> Iterator[tuple[int, int]]: ...
    def rows(self, start: int, stop: int) -> QuantizedWeight: ...


class SourceRows(Protocol):
    """The parent's values as rows: a tensor, or rows of a file."""

    def __getitem__(self, rows: slice, /) -> Tensor: ...


def measure(weight: DecodedRows, parent: SourceRows | None = None) -> WeightFigures:
    """Measure a decoded weight, beside its parent where there is one."""
    return measured(weight, parent).figures()


def measured(weight: DecodedRows, parent: SourceRows | None = None) -> Measurement:
    """Add up the sums over all chunks of a weight."""
    measurement = Measurement(weight)
    height = weight.tile[0]
    tall = None
    if parent is not None and height > TALL:
        tall = _extremes_of_tall_tiles(weight, parent)
    for start, stop in weight.spans():
        chunk = weight.rows(start, stop)
        source = None if parent is None else parent[start:stop]
        extremes = None if tall is None else tall[start // height]
        measurement.add(start, chunk, source, extremes)
    return measurement


def _extremes_of_tall_tiles(weight: DecodedRows, parent: SourceRows) -> list[Extremes]:
    """Find the extremes of each row of tiles, by spans of its rows."""
    rows, columns = weight.shape
    height, width = weight.tile
    extremes: list[Extremes] = []
    scratch = Scratch()
    for start, stop in weight.spans():
        part = parent[start:stop]
        across = -(-columns // min(width, columns))
        wide = scratch.padded("parent", part, (stop - start, across * min(width, columns)))
        tiles = wide.view(1, stop - start, across, -1)
        bits = scratch.get("bits", tuple(tiles.shape), torch.int32)
        these = Extremes.of(tiles, signed=weight.has_zero_points, bits=bits)
        if start // height == len(extremes):
            extremes.append(these)
        else:
            extremes[-1] = extremes[-1].or_more(these)
    assert len(extremes) == -(-rows // height)
    return extremes


@dataclass
class ScaleSums:
    """Counts of scales, and their ratios to ideal ones where these have been made."""

    every: int = 1
    count: int = 0
    not_finite: int = 0
    zero: int = 0
    negative: int = 0
    smallest: float = math.inf
    largest: float = -math.inf
    first: float | None = None
    all_equal: bool = True
    ratios: list[Tensor] = field(default_factory=list)

    def add(self, scales: Tensor, ideal: Tensor | None) -> None:
        count = scales.numel()
        if not count:
            return
        self.first = float(scales[0, 0]) if self.first is None else self.first
        low, high = float(scales.amin()), float(scales.amax())
        self.count += count
        self.all_equal = self.all_equal and low == high == self.first
        if not (math.isfinite(low) and math.isfinite(high)):
            finite = scales[scales.isfinite()]
            self.not_finite += count - finite.numel()
            low = float(finite.min()) if finite.numel() else math.inf
            high = float(finite.max()) if finite.numel() else -math.inf
        if low <= 0:
            self.zero += int((scales == 0).sum())
            self.negative += int((scales < 0).sum())
        self.smallest, self.largest = min(self.smallest, low), max(self.largest, high)
        if ideal is not None and ideal.shape == scales.shape:
            own, other = (x.reshape(-1)[:: self.every] for x in (scales, ideal))
            both = (own > 0) & (other > 0) & own.isfinite()
            self.ratios.append(own[both] / other[both])

    def figures(self) -> ScaleFigures:
        """Return the figures of all scales."""
        ratios = torch.cat(self.ratios) if self.ratios else torch.empty(0)
        has_finite = self.smallest <= self.largest
        return ScaleFigures(
            count=self.count,
            not_finite=self.not_finite,
            zero=self.zero,
            negative=self.negative,
            smallest=self.smallest if has_finite else math.nan,
            largest=self.largest if has_finite else math.nan,
            all_equal=self.count > 1 and self.all_equal,
            log2_ratio=float(ratios.log2().median()) if ratios.numel() else None,
        )


class Measurement:
    """Sums over the chunks of one weight."""

    def __init__(self, weight: DecodedRows) -> None:
        rows, columns = weight.shape
        height, width = min(weight.tile[0], max(rows, 1)), min(weight.tile[1], max(columns, 1))
        tiles = -(-rows // max(1, height)) * -(-columns // max(1, width))
        self._height, self._element = weight.tile[0], weight.element
        self._count = rows * columns
        self._scales = ScaleSums(every=-(-tiles // RATIOS) or 1)
        self._scratch = Scratch()
        self._unused: list[float] | None = None
        self._not_finite = self._zeros = self._ends = self._flushed = 0
        self._own_energy = self.energy = 0.0
        self._rows: list[Tensor] = []
        self._ideal_rows: list[Tensor] = []

    # Adding --------------------------------------------------------------------------------------

    def add(
        self,
        start: int,
        weight: QuantizedWeight,
        parent: Tensor | None,
        extremes: Extremes | None = None,
    ) -> None:
        """Add rows from `start` on; `extremes` are those of tiles that are taller."""
        rows, columns = weight.elements.shape
        if not rows or not columns:
            return
        self._see_codes(weight)
        width = min(weight.tile[1], columns)
        step = max(1, 2 * CHUNK // rows // width) * width
        sums = torch.zeros(2, rows, dtype=torch.float64)
        for first in range(0, columns, step):
            last = min(first + step, columns)
            part = weight if last - first == columns else weight.columns(first, last)
            source = None if parent is None else parent[:, first:last]
            tiles = slice(first // width, -(-last // width))
            its = extremes if extremes is None else extremes.columns(tiles)
            is_new = self._height <= TALL or start % self._height == 0
            self._add_part(part, source, its, sums, is_new=is_new)
        if parent is not None:
            self._rows.append(sums[0])
            self._ideal_rows.append(sums[1])

    def _add_part(
        self,
        weight: QuantizedWeight,
        parent: Tensor | None,
        extremes: Extremes | None,
        sums: Tensor,
        *,
        is_new: bool,
    ) -> None:
        """Add columns that are worked on at once; `sums` are those of rows."""
        tiled = _Tiled(weight)
        values, zeros = self._add_values(weight, tiled)
        if parent is None:
            if is_new:
                self._scales.add(weight.scales, None)
            return
        wide = self._scratch.padded("parent", parent, tiled.padded)
        if extremes is None:
            bits = self._scratch.get("bits", tiled.shape, torch.int32)
            signed = weight.zero_points is not None
            extremes = Extremes.of(wide.view(tiled.shape), signed=signed, bits=bits)
        scales, shifts = ideal_scales(weight, extremes)
        if is_new:
            self._scales.add(weight.scales, scales)
        off = self._ideal_differences(wide, scales, shifts, tiled, zeros)
        source = tiled.cut(wide)
        self.energy += float(torch.linalg.vector_norm(source).double().square())
        sums[0] += _squared_rows(values.sub_(source))
        sums[1] += _squared_rows(off)

    def _add_values(self, weight: QuantizedWeight, tiled: _Tiled) -> tuple[Tensor, Array]:
        """Decode, and count; return the values, and which are zero."""
        low, high = element_range(weight.element)
        wide = self._scratch.padded("values", _wide(weight.elements), tiled.padded)
        values = tiled.cut(wide)
        self._ends += self._count_where(np.greater_equal, values, high / weight.unit)
        self._ends += self._count_where(
            np.less_equal, values, (low if low >= 0 else -high) / weight.unit
        )
        tiles = wide.view(tiled.shape)
        if weight.zero_points is not None:
            tiles.sub_(weight.zero_points[:, None, :, None])
        scales = weight.scales if weight.unit == 1.0 else weight.scales * weight.unit
        tiles.mul_(scales[:, None, :, None])
        norms = torch.linalg.vector_norm(values, dim=1)
        if not bool(norms.isfinite().all()):
            finite = values.isfinite()
            self._not_finite += int((~finite).sum())
            values.masked_fill_(~finite, 0.0)
            norms = torch.linalg.vector_norm(values, dim=1)
        self._own_energy += float(norms.double().square().sum())
        zeros = self._mask("zeros", values.shape)
        np.equal(values.numpy(), 0, out=zeros)
        self._zeros += int(np.count_nonzero(zeros))
        return values, zeros

    def _ideal_differences(
        self,
        wide: Tensor,
        scales: Tensor,
        shifts: Tensor | None,
        tiled: _Tiled,
        zeros: Array,
    ) -> Tensor:
        """Return the ideal quantizer's values less the parent's, and count flushed ones."""
        spread = scales[:, None, :, None]
        ratios = self._scratch.get("ratios", tiled.shape)
        torch.div(wide.view(tiled.shape), spread, out=ratios)
        if shifts is not None:
            ratios.add_(shifts[:, None, :, None])
        rounded = self._scratch.get("rounded", tiled.shape).copy_(ratios)
        bits = self._scratch.get("bits", tiled.shape, torch.int32)
        round_in_place(self._element, rounded, bits)
        codes = rounded if shifts is None else rounded - shifts[:, None, :, None]
        kept = self._mask("kept", zeros.shape)
        np.not_equal(tiled.cut(codes.view(tiled.padded)).numpy(), 0, out=kept)
        self._flushed += int(np.count_nonzero(np.logical_and(kept, zeros, out=kept)))
        return tiled.cut(rounded.sub_(ratios).mul_(spread).view(tiled.padded))

    def _count_where(self, compare: np.ufunc, x: Tensor, bound: float) -> int:
        mask = self._mask("kept", x.shape)
        compare(x.numpy(), np.float32(bound), out=mask)
        return int(np.count_nonzero(mask))

    def _mask(self, name: str, shape: tuple[int, ...]) -> Array:
        return self._scratch.get(name, tuple(shape), torch.bool).numpy()

    def _see_codes(self, weight: QuantizedWeight) -> None:
        """Strike codes that occur from those that have not, of formats up to 4 bits."""
        if self._unused is None:
            self._unused = _codes(weight)
        if self._unused:
            elements = weight.elements.numpy()
            self._unused = [code for code in self._unused if not (elements == code).any()]

    # Figures -------------------------------------------------------------------------------------

    @property
    def least(self) -> float:
        """Return the squared error of the ideal quantizer."""
        return sum(float(rows.sum()) for rows in self._ideal_rows)

    def figures(self) -> WeightFigures:
        """Return the figures of the whole weight."""
        count = self._count
        figures = WeightFigures(
            count=count,
            not_finite=self._not_finite,
            zero_share=self._zeros / count if count else 0.0,
            unused_codes=len(self._unused or ()),
            at_ends_share=self._ends / count if count else 0.0,
            scales=self._scales.figures(),
        )
        return self._beside(figures) if self._rows else figures

    def _beside(self, figures: WeightFigures) -> WeightFigures:
        """Add the figures that compare a weight with its parent."""
        rows, ideal_rows = torch.cat(self._rows), torch.cat(self._ideal_rows)
        total, least, energy = float(rows.sum()), float(ideal_rows.sum()), self.energy
        norms = (self._own_energy * energy) ** 0.5
        ratios = rows / ideal_rows.clamp(min=1e-12 * energy / len(rows) + 1e-300)
        row = int(ratios.argmax())
        return replace(
            figures,
            error=total / energy if energy else 0.0,
            cosine=(self._own_energy + energy - total) / 2 / norms if norms else 0.0,
            over_ideal_db=ratio_db(total, least, energy),
            worst_row=(row, float(PER_DB * torch.log10(ratios[row].clamp(min=1e-30)))),
            flushed_share=self._flushed / self._count,
        )


class _Tiled:
    """The shape of a chunk as tiles [down, height, across, width], with what is added to fit."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.rows, self.columns = weight.elements.shape
        height, width = min(weight.tile[0], self.rows), min(weight.tile[1], self.columns)
        down, across = -(-self.rows // height), -(-self.columns // width)
        self.shape = down, height, across, width
        self.padded = down * height, across * width

    def cut(self, wide: Tensor) -> Tensor:
        """Return the chunk without what was added to fit."""
        return wide[: self.rows, : self.columns]


def _wide(elements: Tensor) -> Tensor:
    """Return elements in a dtype that is copied to float32 fast: FP8 from a table."""
    is_fp8 = elements.dtype.itemsize == 1 and elements.is_floating_point()
    return widen(elements) if is_fp8 else elements


def _squared_rows(difference: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(difference, dim=1)
    return norms.double().square()


def _codes(weight: QuantizedWeight) -> list[float]:
    """List the elements that a format of up to 4 bits has, in the type that they are stored in."""
    if weight.element == "fp4_e2m1":
        codes = [float(value) / weight.unit for value in get(weight.element).values()]
    elif weight.element in ("int4", "uint4", "int2", "uint2"):
        low, high = element_range(weight.element)
        codes = [float(code) for code in range(int(low), int(high) + 1)]
    else:
        return []
    # Integers that are compared with a float would be widened first.
    return codes if weight.elements.is_floating_point() else [int(code) for code in codes]


def over_codes_db(weight: QuantizedWeight, parent: Tensor) -> float:
    """Return the error over that of the nearest codes at the stored scales."""
    total = least = energy = 0.0
    for start, stop in weight.spans():
        chunk, source = weight.rows(start, stop), parent[start:stop].float()
        scales = chunk.scales[:, None, :, None]
        usable = torch.where((scales > 0) & scales.isfinite(), scales, 1.0)
        zeros = 0.0 if chunk.zero_points is None else chunk.zero_points[:, None, :, None]
        codes = round_to(chunk.element, chunk.in_tiles(source) / usable + zeros)
        nearest = chunk.from_tiles((codes - zeros) * torch.where(scales.isfinite(), scales, 0.0))
        total += squared(chunk.values().nan_to_num(0, 0, 0) - source)
        least += squared(nearest - source)
        energy += squared(source)
    return ratio_db(total, least, energy)


def squared(x: Tensor) -> float:
    """Return the sum of squares."""
    return float(torch.linalg.vector_norm(x).double().square())


def ratio_db(total: float, least: float, energy: float) -> float:
    """Return an error over another one in dB; rounding of float32 is no error."""
    floor = 1e-13 * energy
    return PER_DB * math.log10(total / max(least, floor)) if total > floor else 0.0
