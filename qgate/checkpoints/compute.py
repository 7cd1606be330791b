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
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from qgate.checkpoints.chunk_memory import Workspace, thread_memory
from qgate.checkpoints.conventions import CONVENTIONS, NESTED, BlockConvention, count_zero_blocks
from qgate.checkpoints.grids import CHUNK, FP4_UNIT, TALL, QuantizedWeight, widen, widen_to
from qgate.checkpoints.ideal import (
    Extremes,
    element_codes,
    element_range,
    ideal_scales,
    write_rounded,
)
from qgate.checkpoints.local_sums import ROW_DB, USUAL, GroupSums, tile_sums
from qgate.checkpoints.record import ScaleFigures, WeightFigures

Array = np.ndarray[Any, Any]
PER_DB = 10.0
RATIOS = 1 << 20
"""Scales of one weight that are compared with ideal ones, at most about."""
ALIKE = 1e4
"""Ratio of energies up to which the product of tensors follows from their difference."""

SCALES = 1 << 16
"""Scales that are counted at once, of several chunks."""
ENOUGH = 1 << 12
"""Blocks of NVFP4 that tell how their largest elements were chosen."""

OCTAVES = 320
"""Exponents of float32, from below the smallest to above the largest."""
FEW_OCTAVES = 8
SPARSE = 64
"""Of so many ratios, one is looked at first."""
TINY = torch.finfo(torch.float32).tiny


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
    for start, stop in weight.spans():
        work = thread_memory().workspace((stop - start, columns), (stop - start, width))
        work.parent.copy_(parent[start:stop])
        these = Extremes.of(work.parent_tiles, signed=weight.has_zero_points, bits=work.bits)
        if start // height == len(extremes):
            extremes.append(these)
        else:
            extremes[-1] = extremes[-1].or_more(these)
    assert len(extremes) == -(-rows // height)
    return extremes


class Measurement:
    """Sums over the chunks of one weight."""

    def __init__(self, weight: DecodedRows) -> None:
        rows, columns = weight.shape
        height, width = min(weight.tile[0], max(rows, 1)), min(weight.tile[1], max(columns, 1))
        tiles = -(-rows // max(1, height)) * -(-columns // max(1, width))
        self._height, self._element = weight.tile[0], weight.element
        self._convention = CONVENTIONS.get(weight.element)
        self._count = rows * columns
        self._scales = ScaleSums(every=-(-tiles // RATIOS) or 1)
        self._scale_codes = ScaleCodeSums()
        self._memory = thread_memory()
        self._unused: list[float] | None = None
        self._not_finite = self._zeros = self._ends = self._flushed = self._zero_blocks = 0
        self._own_energy = self.energy = self._product = 0.0
        self._rows: list[Tensor] = []
        self._groups = GroupSums()
        is_own = self._convention is None or weight.element in NESTED
        is_row = (height, width) == (1, columns)
        self._has_groups = is_own and tiles > 1 and height <= TALL and not is_row

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
        if weight.order is not None:
            # Sums of rows are the same in any order of columns.
            parent = None if parent is None else parent.index_select(1, weight.order)
            weight = weight.in_order()
        width = min(weight.tile[1], columns)
        block = width * (1 if self._convention is None else self._convention.tiles)
        step = max(1, 2 * CHUNK // rows // block) * block
        is_new = self._height <= TALL or start % self._height == 0
        sums = torch.zeros(3, rows, dtype=torch.float64)
        for first in range(0, columns, step):
            last = min(first + step, columns)
            part = weight if last - first == columns else weight.columns(first, last)
            work = self._memory.workspace(part.shape, part.tile)
            own_energy = self._add_values(part, work)
            ideal = None
            if parent is not None:
                work.parent.copy_(parent[:, first:last])
                tiles = slice(first // width, -(-last // width))
                its = extremes if extremes is None else extremes.columns(tiles)
                ideal = self._add_differences(part, work, its, sums, own_energy, (start, first))
            if is_new:
                scales = part.scales.abs() if part.signed_scales else part.scales
                self._scales.add(scales, ideal)
                self._scale_codes.add(part)
        if parent is not None:
            self._rows.append(sums)

    def _add_values(self, weight: QuantizedWeight, work: Workspace) -> float:
        """Decode, count what needs no parent, and return the sum of the squared values."""
        widen_to(work.values, weight.elements, work.halves)
        self._ends += _count_ends(weight, work)
        if weight.zero_points is not None:
            work.value_tiles.sub_(weight.zero_points[:, None, :, None])
        scales = weight.scales if weight.unit == 1.0 else weight.scales * weight.unit
        work.value_tiles.mul_(scales[:, None, :, None])
        if weight.offsets is not None:
            work.value_tiles.add_(weight.offsets[:, None, :, None])
        energy = _squared_rows(work.values).sum()
        lost = None
        if not bool(energy.isfinite()):
            lost = ~work.values.isfinite()
            self._not_finite += int(lost.sum())
            work.values.masked_fill_(lost, 0.0)
            energy = _squared_rows(work.values).sum()
        self._own_energy += float(energy)
        np.equal(work.values_array, 0, out=work.zeros)
        if lost is not None:
            work.zeros[lost.numpy()] = False
        self._zeros += int(np.count_nonzero(work.zeros))
        return float(energy)

    def _add_differences(
        self,
        weight: QuantizedWeight,
        work: Workspace,
        extremes: Extremes | None,
        sums: Tensor,
        own_energy: float,
        place: tuple[int, int],
    ) -> Tensor:
        """Add the errors of rows, and those of the ideal quantizer, whose scales are returned.

        sums   of rows: errors, those of the ideal quantizer, and the parent's energy
        place  the row and the column at which the chunk begins
        """
        if self._convention is None:
            scales = self._put_ideal(weight, work, extremes)
        else:
            scales = self._put_convention(self._convention, work)
        np.logical_and(work.mask, work.zeros, out=work.mask)
        self._flushed += int(np.count_nonzero(work.mask))
        energies = _squared_rows(work.parent)
        sums[2] += energies
        energy = float(energies.sum())
        self.energy += energy
        is_alike = energy < ALIKE * own_energy and own_energy < ALIKE * energy
        product = 0.0 if is_alike else float((work.values * work.parent).sum(dtype=torch.float64))
        work.values.sub_(work.parent)
        if self._has_groups:
            tiles = tile_sums(work, work.value_tiles), tile_sums(work, work.rounded)
            errors, least = (x.sum(2).reshape(-1)[: len(energies)].double() for x in tiles)
            own, ideal = (x[:, 0] if x.shape[1] == 1 else x.sum(1) for x in tiles)
            self._groups.add(own, ideal, scales, place, weight.tile)
        else:
            errors, least = _squared_rows(work.values), _squared_rows(work.cut(work.rounded))
        sums[0] += errors
        sums[1] += least
        self._product += (own_energy + energy - float(errors.sum())) / 2 if is_alike else product
        return scales

    def _put_ideal(
        self, weight: QuantizedWeight, work: Workspace, extremes: Extremes | None
    ) -> Tensor:
        """Put the errors of ideal values into `rounded`, and where these are not 0 into `mask`."""
        if extremes is None:
            signed = weight.zero_points is not None
            extremes = Extremes.of(work.parent_tiles, signed=signed, bits=work.bits)
        scales, shifts = ideal_scales(weight, extremes)
        spread = scales[:, None, :, None]
        torch.div(work.parent_tiles, spread, out=work.ratios)
        if shifts is not None:
            work.ratios.add_(shifts[:, None, :, None])
        write_rounded(weight.element, work.ratios, work.rounded, work.bits)
        if shifts is None:
            np.not_equal(work.rounded_array, 0, out=work.mask)
        elif work.mask_tiles is not None:
            np.not_equal(
                work.rounded.numpy(), shifts[:, None, :, None].numpy(), out=work.mask_tiles
            )
        else:
            codes = work.cut(work.rounded - shifts[:, None, :, None])
            np.not_equal(codes.numpy(), 0, out=work.mask)
        work.rounded.sub_(work.ratios).mul_(spread)
        return scales

    def _put_convention(self, convention: BlockConvention, work: Workspace) -> Tensor:
        """Do the same with the values that a convention has."""
        tiles, scales = convention.ideal(work.parent_tiles[:, 0])
        ideal = work.cut(tiles.contiguous()[:, None])
        if work.zeros.any():
            np.not_equal(ideal.numpy(), 0, out=work.mask)
            size = tiles.shape[2] * convention.tiles
            self._zero_blocks += count_zero_blocks(work.values, ideal, size)
        torch.sub(tiles[:, None], work.parent_tiles, out=work.rounded)
        return scales

    def _see_codes(self, weight: QuantizedWeight) -> None:
        """Strike codes that occur from those that have not, of formats up to 4 bits."""
        if self._unused is None:
            self._unused = element_codes(weight)
        if self._unused:
            elements = weight.elements.numpy()
            self._unused = [code for code in self._unused if not (elements == code).any()]

    # Figures -------------------------------------------------------------------------------------

    @property
    def least(self) -> float:
        """Return the squared error of the ideal quantizer."""
        return sum(float(rows[1].sum()) for rows in self._rows)

    def figures(self) -> WeightFigures:
        """Return the figures of the whole weight."""
        count = self._count
        figures = WeightFigures(
            count=count,
            not_finite=self._not_finite,
            zero_share=self._zeros / count if count else 0.0,
            unused_codes=len(self._unused or ()),
            at_ends_share=self._ends / count if count else 0.0,
            scales=self._scale_figures(),
            subnormal_scales=self._scale_codes.subnormal,
            outside_zero_points=self._scale_codes.outside_zero_points,
            zero_blocks=self._zero_blocks,
            fours_share=self._scale_codes.fours_share,
        )
        return self._beside(figures) if self._rows else figures

    def _scale_figures(self) -> ScaleFigures:
        scales = self._scales.figures()
        if self._convention is None:
            return scales
        # Blocks without a scale may be zero in the parent; nearest entries have other scales.
        return replace(
            scales,
            zero=0,
            negative=0 if self._convention.has_signs else scales.negative,
            log2_ratio=None if self._convention.book else scales.log2_ratio,
        )

    def _beside(self, figures: WeightFigures) -> WeightFigures:
        """Add the figures that compare a weight with its parent."""
        rows, ideal_rows, energies = torch.cat(self._rows, 1)
        total, least, energy = float(rows.sum()), float(ideal_rows.sum()), self.energy
        norms = (self._own_energy * energy) ** 0.5
        usual = USUAL * least / energy * energies if energy else energies
        floor = usual.clamp(min=1e-12 * energy / len(rows) + 1e-300)
        ratios = rows / torch.maximum(ideal_rows, floor)
        decibels = (PER_DB * torch.log10(ratios.clamp(min=1e-30))).numpy().round(4) + 0.0
        row = int(decibels.argmax())
        is_over = torch.from_numpy(decibels > ROW_DB)
        least_of_others, groups = ideal_rows[~is_over], self._groups
        groups.finish()
        return replace(
            figures,
            error=total / energy if energy else 0.0,
            cosine=self._product / norms if norms else 0.0,
            over_ideal_db=ratio_db(total, least, energy),
            worst_row=(row, float(decibels[row])),
            rows_over=int(is_over.sum()),
            other_rows_db=ratio_db(
                float(rows[~is_over].sum()), float(least_of_others.sum()), energy
            ),
            worst_group=groups.worst,
            groups_over=groups.over,
            other_groups_db=None
            if groups.worst is None
            else ratio_db(total - groups.own, least - groups.least, energy),
            flushed_share=self._flushed / self._count,
        )


def _count_ends(weight: QuantizedWeight, work: Workspace) -> int:
    """Count elements at the ends of their format, by their codes where these are bytes."""
    low, high = element_range(weight.element)
    low, high = max(low, -high) / weight.unit, high / weight.unit
    dtype = weight.elements.dtype
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        first, count = _codes_from(dtype, high)
        codes: Array = weight.elements.view(torch.uint8).numpy() & np.uint8(0x7F)
        codes -= first
        np.less(codes, count, out=work.mask)
        return int(np.count_nonzero(work.mask))
    is_byte = dtype in (torch.int8, torch.uint8) and low.is_integer() and high.is_integer()
    if is_byte and torch.iinfo(dtype).min <= low < high <= torch.iinfo(dtype).max:
        # Between the ends are those that wrap around to small bytes.
        codes = weight.elements.view(torch.uint8).numpy() - np.uint8(int(low + 1) % 256)
        np.greater_equal(codes, np.uint8(int(high - low - 1)), out=work.mask)
        return int(np.count_nonzero(work.mask))
    ends = 0
    for compare, bound in ((np.greater_equal, high), (np.less_equal, low)):
        compare(work.values_array, np.float32(bound), out=work.mask)
        ends += int(np.count_nonzero(work.mask))
    return ends


@lru_cache
def _codes_from(dtype: torch.dtype, least: float) -> tuple[np.uint8, np.uint8]:
    """Return the first code of FP8 that has so much, without its sign, and how many have."""
    magnitudes = widen(torch.arange(128, dtype=torch.uint8).view(dtype))
    codes = (magnitudes >= least).nonzero()
    return np.uint8(int(codes[0]) if len(codes) else 0), np.uint8(len(codes))


def _squared_rows(difference: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(difference, dim=1)
    return norms.double().square()


def _log2_of_median(ratios: Tensor) -> float:
    """Return the lower median of positive numbers as a power of two."""
    middle = (ratios.numel() - 1) // 2
    median = ratios[::SPARSE].median()
    # Of ratios that are 1 for the most part, some tell the median of all.
    low, high = (int(torch.count_nonzero(x)) for x in (ratios < median, ratios <= median))
    return float((median if low <= middle < high else ratios.median()).log2())


def squared(x: Tensor) -> float:
    """Return the sum of squares."""
    return float(torch.linalg.vector_norm(x).double().square())


def ratio_db(total: float, least: float, energy: float) -> float:
    """Return an error over another one in dB, to 0.0001 dB; rounding of float32 is no error."""
    floor = 1e-13 * energy
    decibels = PER_DB * math.log10(total / max(least, floor)) if total > floor else 0.0
    return round(decibels, 4) + 0.0  # no negative zero


@dataclass
class ScaleCodeSums:
    """Counts over the chunks of one weight."""

    subnormal: int = 0
    fours: int = 0
    sixes: int = 0
    _outside: int = 0
    _has_fractions: bool = False

    def add(self, weight: QuantizedWeight) -> None:
        """Add the scales and zero points of a chunk."""
        self.subnormal += _count_subnormal(weight.scale_codes)
        self._see_maxima(weight)
        zeros = weight.zero_points
        if zeros is None or self._has_fractions:
            return
        # Those with fractions are stored minima.
        points: Array = zeros.numpy()
        self._has_fractions = bool((points != np.rint(points)).any())
        low, high = element_range(weight.element)
        self._outside += int(np.count_nonzero(points < low) + np.count_nonzero(points > high))

    def _see_maxima(self, weight: QuantizedWeight) -> None:
        """Count blocks of NVFP4 by their largest element, in leading rows."""
        codes, enough = weight.scale_codes, self.fours + self.sixes >= ENOUGH
        is_nvfp4 = weight.element == "fp4_e2m1" and weight.tile == (1, 16)
        if enough or codes is None or codes.dtype != torch.float8_e4m3fn or not is_nvfp4:
            return
        some = weight.rows(0, min(len(weight.elements), -(-16 * ENOUGH // weight.shape[1])))
        largest = some.in_tiles(some.elements).abs().amax((1, 3))
        self.fours += int(np.count_nonzero(largest.numpy() == int(4 / FP4_UNIT)))
        self.sixes += int(np.count_nonzero(largest.numpy() == int(6 / FP4_UNIT)))

    @property
    def fours_share(self) -> float | None:
        """Return the share of blocks whose largest element is 4, of those with 4 or 6."""
        count = self.fours + self.sixes
        return self.fours / count if count else None

    @property
    def outside_zero_points(self) -> int:
        """Return how many whole zero points are no codes of the elements."""
        return 0 if self._has_fractions else self._outside


def _count_subnormal(codes: Tensor | None) -> int:
    """Count E4M3 codes below the smallest normal value, but not zeros."""
    if codes is None or codes.dtype != torch.float8_e4m3fn:
        return 0
    magnitudes: Array = codes.view(torch.uint8).numpy() & np.uint8(0x7F)
    magnitudes -= np.uint8(1)
    return int(np.count_nonzero(magnitudes < np.uint8(7)))


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
    octaves: Tensor = field(default_factory=lambda: torch.zeros(OCTAVES, dtype=torch.long))
    _waiting: list[Tensor] = field(default_factory=list)
    _own: list[Tensor] = field(default_factory=list)
    _ideal: list[Tensor] = field(default_factory=list)

    def add(self, scales: Tensor, ideal: Tensor | None) -> None:
        """Add the scales of a chunk; several chunks are counted at once."""
        if not scales.numel():
            return
        self._waiting.append(scales.reshape(-1))
        if ideal is not None and ideal.shape == scales.shape:
            self._own.append(self._waiting[-1][:: self.every])
            self._ideal.append(ideal.reshape(-1)[:: self.every])
        if len(self._waiting) * scales.numel() >= SCALES:
            self._finish()

    def _finish(self) -> None:
        if not self._waiting:
            return
        if self._own:
            self.ratios.append(torch.cat(self._own) / torch.cat(self._ideal))
        scales = torch.cat(self._waiting)
        self._waiting, self._own, self._ideal = [], [], []
        count = scales.numel()
        self.first = float(scales[0]) if self.first is None else self.first
        low, high = float(scales.amin()), float(scales.amax())
        is_plain = low > 0 and math.isfinite(high)
        if is_plain:
            self._add_octaves(scales, low, high)
        else:
            plain = scales[(scales > 0) & scales.isfinite()]
            if plain.numel():
                self._add_octaves(plain, float(plain.amin()), float(plain.amax()))
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

    def figures(self) -> ScaleFigures:
        """Return the figures of all scales."""
        self._finish()
        ratios = torch.cat(self.ratios) if self.ratios else torch.empty(0)
        if not len(ratios) or not (ratios.amin() > 0 and ratios.amax().isfinite()):
            ratios = ratios[(ratios > 0) & ratios.isfinite()]
        has_finite = self.smallest <= self.largest
        return ScaleFigures(
            count=self.count,
            not_finite=self.not_finite,
            zero=self.zero,
            negative=self.negative,
            smallest=self.smallest if has_finite else None,
            largest=self.largest if has_finite else None,
            all_equal=self.count > 1 and self.all_equal,
            log2_ratio=_log2_of_median(ratios) if ratios.numel() else None,
            octaves=self._octaves(),
        )

    def _add_octaves(self, scales: Tensor, low: float, high: float) -> None:
        """Count positive scales by their exponent."""
        first, last = math.frexp(low)[1], math.frexp(high)[1]
        if low < TINY or last - first > FEW_OCTAVES:
            _, exponents = np.frexp(scales.float().numpy())
            counts = np.bincount(exponents.reshape(-1) + OCTAVES // 2, minlength=OCTAVES)
            self.octaves += torch.from_numpy(counts)
            return
        # Bytes of few exponents, which their bits are for normal numbers, are counted one by one.
        exponents = (scales.float().numpy().view(np.int32) >> 23).astype(np.uint8)
        octaves: Array = self.octaves.numpy()
        for exponent in range(first, last + 1):
            count = np.count_nonzero(exponents == np.uint8(exponent + 126))
            octaves[exponent + OCTAVES // 2] += count

    def _octaves(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the counts from the lowest exponent on, with that exponent."""
        used = self.octaves.nonzero().reshape(-1)
        if not used.numel():
            return None
        low, high = int(used[0]), int(used[-1])
        return low - OCTAVES // 2 - 1, tuple(self.octaves[low : high + 1].tolist())
