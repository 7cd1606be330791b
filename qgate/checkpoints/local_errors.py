"""Name what is wrong with single rows or groups of a weight whose error is right on the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.checkpoints.compute import SourceRows
from qgate.checkpoints.findings import LIMIT_DB
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.local_sums import CHANGED_DB, GROUP_DB, ROW_DB
from qgate.checkpoints.record import WeightFigures
from qgate.checkpoints.rows import WeightRows
from qgate.text import counted
from qgate.text.wording import decibels

ALIKE = 0.85
"""Cosine at which values are the parent's but for their size, or those of another place."""
SAME_SIZE = 0.05
"""Logarithm of a factor that is no fault of scales."""
POWER = 0.1
"""Logarithm by which a factor may differ from a power of two that it is taken for."""
NEIGHBORS = 64
"""Rows before and after among which foreign codes are looked for."""
ONE_GROUP = 0.8
"""Share of the error of a row that is one of its groups'."""
APART_DB = 8.0
"""How far the error of the worst is above that of all others, at least."""
ZERO_POINT_DB = 7.0
"""Error over ideal from which on a zero point may be one step off, which costs about 11 dB."""
ONE_STEP, STEP_SPREAD, FEWEST = 0.2, 0.45, 8
"""How far from one step the mean error of a group with such a zero point is, and its spread."""
COLUMN = 16.0
"""How many times the error of the median column one with other values has."""
FEW, MANY = 1 / 16, 1 / 2
"""Largest share of rows or groups that are named: beside another cause, and without one."""


def local_cause(
    rows: WeightRows,
    source: SourceRows,
    figures: WeightFigures,
    *,
    is_known: bool = False,
    has_groups: bool = True,
    is_changed: bool = False,
) -> str:
    """Say how many rows or groups have far more error than others, and what the worst one has.

    is_known    True where another cause is known: all others must be right, then
    has_groups  False where a method passes errors on from group to group
    is_changed  True where a method may have clipped groups or passed errors on
    """
    row, group = figures.worst_row, figures.worst_group
    row_db, group_db = (CHANGED_DB, CHANGED_DB) if is_changed else (ROW_DB, GROUP_DB)
    is_row = row is not None and row[1] > row_db
    is_group = group is not None and has_groups and group[2] > group_db
    if is_group and is_row and row is not None:
        is_row = not _is_in_one_group(rows, source, row[0])
    if is_row and row is not None:
        share = figures.rows_over / max(1, rows.shape[0])
        is_local = _is_local(share, row[1], figures.other_rows_db, is_known=is_known)
        return _row_cause(rows, source, figures.rows_over, row) if is_local else ""
    if is_group and group is not None:
        share = figures.groups_over / max(1, figures.scales.count)
        is_local = _is_local(share, group[2], figures.other_groups_db, is_known=is_known)
        return _group_cause(rows, source, figures, group) if is_local else ""
    if rows.has_zero_points and not is_known:
        return _zero_point_cause(rows, source, figures)
    return ""


def _zero_point_cause(rows: WeightRows, source: SourceRows, figures: WeightFigures) -> str:
    """Name a group whose values are all one step off: its error is near that of right exporters."""
    row, group = figures.worst_row, figures.worst_group
    if group is not None and group[2] > ZERO_POINT_DB:
        first, column, size = group
    elif row is not None and row[1] > ZERO_POINT_DB and rows.tile[1] >= rows.shape[1]:
        (first, size), column = row, 0
    else:
        return ""
    unit = math.lcm(rows.together, rows.tile[0])
    start = first // unit * unit
    chunk = rows.rows(start, min(start + unit, rows.shape[0]))
    down, across = (first - start) // rows.tile[0], column // rows.tile[1]
    tiles = [
        chunk.in_tiles(x)[down, :, across].flatten()
        for x in (chunk.values(), source[start : start + chunk.shape[0]].float())
    ]
    steps = (tiles[0] - tiles[1]) / chunk.scales[down, across]
    mean, spread = float(steps.mean()), float(steps.std())
    if not abs(abs(mean) - 1) < ONE_STEP or not spread < STEP_SPREAD or len(steps) < FEWEST:
        return ""
    where = _place(chunk, first, across)
    return (
        f"{where}: the zero point is 1 too {'low' if mean > 0 else 'high'}, {decibels(size)} worse "
        "than ideal"
    )


def _is_local(share: float, worst_db: float, others_db: float | None, *, is_known: bool) -> bool:
    """Return True if a fault is one of some rows or groups, not of the whole weight."""
    others_db = others_db or 0.0
    if is_known:
        return share <= FEW and others_db <= LIMIT_DB
    return share <= MANY and worst_db - max(others_db, 0.0) > APART_DB


def _is_in_one_group(rows: WeightRows, source: SourceRows, row: int) -> bool:
    """Return True if most of the error of a row is in one of its groups."""
    chunk, start = _chunk(rows, row)
    values, parent = chunk.values()[row - start], source[row : row + 1][0].float()
    squares = (values - parent).nan_to_num(0, 0, 0).square()
    if chunk.order is not None:
        squares = squares[chunk.order]
    parts = torch.stack([part.sum() for part in squares.split(rows.tile[1])])
    return len(parts) > 1 and bool(parts.max() > ONE_GROUP * parts.sum())


def _row_cause(rows: WeightRows, source: SourceRows, over: int, worst: tuple[int, float]) -> str:
    row, size = worst
    chunk, start = _chunk(rows, row)
    values, parent = chunk.values()[row - start], source[row : row + 1][0].float()
    first = max(0, row - NEIGHBORS)
    other_values = source[first : min(rows.shape[0], row + NEIGHBORS)].float()
    value_source = ValueSource.of(values, parent, other_values)
    words = value_source.words("row", lambda number: f"row {first + number}")
    foreign = "" if words.startswith("it has") else _foreign_scales(chunk, start, row, parent)
    words = foreign or words
    if value_source.other is not None and over > 1 and words.startswith("it has the codes"):
        other = first + value_source.other
        chunk, start = _chunk(rows, other)
        if ValueSource.is_like(chunk.values()[other - start], parent):
            words = f"rows {min(row, other)} and {max(row, other)} are swapped"
    return (
        f"{counted(over, 'row')} of {rows.shape[0]:,} {_have(over)} far more error than the "
        f"others, most row {row}, {decibels(size)} worse than ideal: {words}"
    )


def _foreign_scales(chunk: QuantizedWeight, start: int, row: int, parent: Tensor) -> str:
    """Name the row before or after whose scales fit the codes of a row."""
    if chunk.tile[0] != 1 or chunk.order is not None:
        return ""
    near = [at for at in (row - 1, row + 1) if start <= at < start + chunk.shape[0]]
    codes = chunk.in_tiles(chunk.float_elements())[row - start, 0]
    parents = chunk.in_tiles(parent.expand(chunk.shape))[row - start, 0]
    lines = [_ScaleLine.of(chunk, slice(at - start, at - start + 1)) for at in (row, *near)]
    number = _fitting_line(codes, parents, lines[0], lines[1:])
    return "" if number is None else f"its own scales stand at row {near[number]}"


@dataclass(frozen=True)
class _ScaleLine:
    """Scales and zero points of some groups."""

    scales: Tensor
    zeros: Tensor

    @classmethod
    def of(cls, chunk: QuantizedWeight, *index: slice) -> _ScaleLine:
        zeros = torch.zeros_like(chunk.scales) if chunk.zero_points is None else chunk.zero_points
        return cls(chunk.scales[index].reshape(-1, 1), zeros[index].reshape(-1, 1))


def _fitting_line(
    codes: Tensor, parent: Tensor, own: _ScaleLine, near: list[_ScaleLine]
) -> int | None:
    """Return the number of the line whose scales fit groups as well as the best ones do.

    codes   groups x elements, as the parent; None also if scales are a power of two off
    """

    def error(scales: Tensor, zeros: Tensor) -> float:
        return float(((codes - zeros) * scales - parent).square().sum())

    centered = codes - own.zeros
    energy = centered.square().sum(1, keepdim=True).clamp(min=1e-30)
    best = (centered * parent).sum(1, keepdim=True) / energy
    room = error(best, own.zeros) * (1.02 + 2 / codes.shape[1])
    powers = (best / own.scales).clamp(min=1e-30).log2().round().exp2()
    if error(own.scales * powers, own.zeros) < room:
        return None
    for number, line in enumerate(near):
        if min(error(line.scales, own.zeros), error(line.scales, line.zeros)) < room:
            return number
    return None


def _group_cause(
    rows: WeightRows, source: SourceRows, figures: WeightFigures, worst: tuple[int, int, float]
) -> str:
    row, column, size = worst
    chunk, start = _chunk(rows, row)
    stop = start + chunk.shape[0]
    parent = source[start:stop].float()
    values = chunk.in_tiles(chunk.values()).transpose(1, 2).flatten(2)
    parents = chunk.in_tiles(parent).transpose(1, 2).flatten(2)
    height, width = rows.tile
    down, across = (row - start) // height, column // width
    count = parents.shape[1]
    value_source = ValueSource.of(
        values[down, across], parents[down, across], parents.flatten(0, 1)
    )

    def place(number: int) -> str:
        return _place(chunk, start + number // count * height, number % count)

    words = value_source.words("group", place)
    if not words.startswith("it has"):
        elsewhere = _group_elsewhere(chunk, down, across, parents[down, across])
        words = f"its own scale stands at {place(elsewhere)}" if elsewhere is not None else words
    over = figures.groups_over
    return (
        f"{counted(over, 'group')} of {figures.scales.count:,} {_have(over)} far more error than "
        f"the others, most {_place(chunk, row, across)}, {decibels(size)} worse than ideal: {words}"
    )


def _group_elsewhere(chunk: QuantizedWeight, down: int, across: int, parent: Tensor) -> int | None:
    """Return the number of the neighboring group whose scale fits the codes of a group."""
    rows, columns = chunk.scales.shape
    places = [(down + step, across + side) for step, side in ((-1, 0), (1, 0), (0, -1), (0, 1))]
    near = [(row, column) for row, column in places if 0 <= row < rows and 0 <= column < columns]
    codes = chunk.in_tiles(chunk.float_elements())[down, :, across].reshape(1, -1)
    lines = [
        _ScaleLine.of(chunk, slice(row, row + 1), slice(column, column + 1))
        for row, column in ((down, across), *near)
    ]
    number = _fitting_line(codes, parent[None], lines[0], lines[1:])
    return None if number is None else near[number][0] * columns + near[number][1]


def wrong_columns(values: Tensor, parent: Tensor, least: float) -> str:
    """Name columns that hold other values than their own, if all others are right.

    least   the squared error of the ideal quantizer
    """
    errors = (values - parent).nan_to_num(0, 0, 0).square().sum(0)
    is_over = errors > COLUMN * errors.median()
    count, columns = int(is_over.sum()), len(errors)
    remaining = float(errors[~is_over].sum())
    if not 1 <= count <= max(2, columns // 16) or remaining > least * 10 ** (LIMIT_DB / 10):
        return ""
    worst = int(errors.argmax())
    first = max(0, worst - NEIGHBORS)
    near = parent[:, first : worst + NEIGHBORS].T
    value_source = ValueSource.of(values[:, worst], parent[:, worst], near)
    words = value_source.words("column", lambda number: f"column {first + number}")
    if value_source.other is not None and words.startswith("it has the codes"):
        other = first + value_source.other
        if ValueSource.is_like(values[:, other], parent[:, worst]):
            words = f"columns {min(worst, other)} and {max(worst, other)} are swapped"
    return (
        f"{counted(count, 'column')} of {columns:,} {_have(count)} far more error than the others, "
        f"most column {worst}, {words}"
    )


def _place(weight: QuantizedWeight, row: int, across: int) -> str:
    """Name the place of a group in the weight."""
    height, width = weight.tile
    first = across * width
    last = min(first + width, weight.shape[1]) - 1
    row_text = f"row {row}" if height == 1 else f"rows {row} to {row + height - 1}"
    if weight.order is not None:
        return f"{row_text}, group {across}"
    return f"{row_text}, columns {first} to {last}"


def _chunk(rows: WeightRows, row: int) -> tuple[QuantizedWeight, int]:
    """Decode the span that a row lies in, and return it with its first row."""
    start, stop = next((a, b) for a, b in rows.spans() if a <= row < b)
    return rows.rows(start, stop), start


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


@dataclass(frozen=True)
class ValueSource:
    """Values beside the parent's, and beside those of other places.

    gain     the size of the values beside the parent's
    cosine   of values and the parent's
    other    the number of the other place whose values these are, None where there is none
    """

    gain: float
    cosine: float
    is_zero: bool
    other: int | None

    @classmethod
    def of(cls, values: Tensor, parent: Tensor, other_values: Tensor) -> ValueSource:
        values, energy = values.nan_to_num(0, 0, 0), float(parent.square().sum())
        product, own = float(values @ parent), float(values.square().sum())
        cosines = (
            other_values @ values / (other_values.norm(dim=1) * math.sqrt(own)).clamp(min=1e-30)
        )
        best = int(cosines.argmax())
        is_other = float(cosines[best]) > ALIKE and not torch.equal(other_values[best], parent)
        return cls(
            gain=product / energy if energy else 0.0,
            cosine=product / math.sqrt(energy * own) if energy and own else 0.0,
            is_zero=own == 0,
            other=best if is_other else None,
        )

    @staticmethod
    def is_like(values: Tensor, parent: Tensor) -> bool:
        """Return True for values that are those of a place, but for rounding."""
        norms = float(values.norm() * parent.norm())
        return norms > 0 and float(values @ parent) > ALIKE * norms

    def words(self, noun: str, place: Callable[[int], str]) -> str:
        """Say what the values are; `place` names another place by its number."""
        if self.is_zero:
            return "its values are zero, and the parent's are not"
        if self.cosine > ALIKE and self.gain > 0 and abs(math.log(self.gain)) > SAME_SIZE:
            times = self.gain if self.gain > 1 else 1 / self.gain
            power = 2.0 ** round(math.log2(times))
            times = power if power > 1 and abs(math.log(times / power)) < POWER else times
            side = "high" if self.gain > 1 else "low"
            return f"its scale{'s are' if noun == 'row' else ' is'} {times:.3g} times too {side}"
        if self.cosine < -ALIKE:
            return "its signs are flipped"
        if self.other is not None and self.cosine < ALIKE:
            return f"it has the codes of {place(self.other)}"
        if self.cosine < ALIKE / 2:
            return "its codes are not those of this place"
        return "its codes are not the nearest ones"
