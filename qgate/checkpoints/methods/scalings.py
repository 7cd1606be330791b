"""Tell scales that AWQ and SmoothQuant move between weights from errors.

A column of a weight may be multiplied by any number if what comes before it is divided by it: the
norm, or the rows of the weight before. The product of both is what the parent has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.checkpoints.compute import SourceRows
from qgate.checkpoints.grouping import find_weights
from qgate.checkpoints.methods.compared_rows import ComparedRows
from qgate.checkpoints.methods.surroundings import Surroundings
from qgate.checkpoints.rows import ContiguousRows, WeightRows
from qgate.checkpoints.stored import StoredEntry
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.errors import QgateError

PAIRS = (("v_proj", "o_proj"), ("up_proj", "down_proj"), ("w3", "w2"), ("fc1", "fc2"))
"""A weight whose rows may be divided by what the columns of the other are multiplied by."""
SCALED = 0.05
"""Least median deviation of factors from 1 that counts as scaled."""
ALIKE = 0.12
"""Largest median deviation of factors from those that undo them, after logarithms."""


@dataclass(frozen=True)
class Scaling:
    """Factors of the columns and rows of a parent, and the tensors of the child that undo them."""

    columns: Tensor
    rows: Tensor | None
    undone_by: tuple[str, ...]


@dataclass(frozen=True)
class ScaledRows:
    """The rows of a parent with the scales that the child has."""

    parent: SourceRows
    scaling: Scaling

    def __getitem__(self, rows: slice) -> Tensor:
        scaled = self.parent[rows].float() * self.scaling.columns
        factors_of_rows = self.scaling.rows
        return scaled if factors_of_rows is None else scaled * factors_of_rows[rows, None]


def find_scaling(layer: Surroundings, weight: ComparedRows) -> Scaling | None:
    """Find factors of columns and rows that other tensors of the child undo."""
    values, parent = weight.leading()
    columns, undone_by = factors(values, parent, 0), []
    by_columns, by_rows = torch.ones(len(columns)), None
    norm = _undoing_norm(layer, columns)
    if norm is not None:
        by_columns = norm[1]
        undone_by.append(norm[0])
    for first, second in PAIRS:
        if f".{second}." in layer.name and norm is None and is_scaled(columns):
            partner = _other_factors(layer, second, first, len(columns), 1)
            if partner is not None and _undo(columns, partner[1]):
                by_columns = (columns * partner[1]).median() / partner[1]
                undone_by.append(partner[0])
        if f".{first}." in layer.name:
            rows = _row_factors(weight, by_columns)
            if is_scaled(rows):
                partner = _other_factors(layer, first, second, len(rows), 0)
                if partner is not None and _undo(rows, partner[1]):
                    by_rows = rows
                    undone_by.append(partner[0])
    return Scaling(by_columns, by_rows, tuple(undone_by)) if undone_by else None


def factors(values: Tensor, parent: Tensor, axis: int) -> Tensor:
    """Return the factors by which columns (axis 0) or rows (axis 1) of a parent were multiplied."""
    energy = parent.square().sum(axis)
    return torch.where(energy > 0, (values * parent).sum(axis) / energy.clamp(min=1e-30), 1.0)


def fit_factors(values: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors by which both columns and rows of a parent were multiplied."""
    columns, rows = torch.ones(parent.shape[1]), torch.ones(parent.shape[0])
    for _ in range(4):
        columns = factors(values, parent * rows[:, None], 0)
        rows = factors(values, parent * columns, 1)
    middle = rows.median()
    return columns * middle, rows / middle


def is_scaled(sizes: Tensor) -> bool:
    """Return True if factors deviate from 1 and have the parent's signs."""
    positive = sizes > 0
    deviation = float(sizes.clamp(min=1e-6).log().abs().median())
    return bool(positive.float().mean() > 0.95) and deviation > SCALED


def _undo(sizes: Tensor, others: Tensor) -> bool:
    return _spread(sizes * others) < min(ALIKE, _spread(sizes) / 2)


def _spread(sizes: Tensor) -> float:
    """Return how far factors are from their median, after logarithms.

    Rows that are scaled as well make the factors of all columns larger or smaller.
    """
    logarithms = sizes.clamp(min=1e-6).log()
    return float((logarithms - logarithms.median()).abs().median())


def changed_norms(layer: Surroundings, length: int) -> Iterator[tuple[str, Tensor]]:
    """List the norms of a layer that the child changed, and the factors that this undoes."""
    for name, own, source in layer.norms(length):
        usable = (own != 0) & (source != 0)
        yield name, torch.where(usable, source / torch.where(usable, own, 1.0), 1.0)


def _undoing_norm(layer: Surroundings, columns: Tensor) -> tuple[str, Tensor] | None:
    """Return the norm whose change undoes the factors of columns, and the factors it undoes."""
    best: tuple[float, str, Tensor] | None = None
    for name, undone in changed_norms(layer, len(columns)):
        if _undo(columns, 1 / undone) and (best is None or _spread(columns / undone) < best[0]):
            best = _spread(columns / undone), name, undone
    return None if best is None else best[1:]


def _other_factors(
    layer: Surroundings, own: str, other: str, length: int, axis: int
) -> tuple[str, Tensor] | None:
    """Return the name and the factors of the weight that undoes this one's."""
    name = layer.name.replace(f".{own}.", f".{other}.")
    stored = next((w for w in find_weights(layer.child) if w.name == name), None)
    if stored is None or name not in layer.parent.entries:
        return None
    source = layer.parent.entries[name]
    try:
        weight = _compared(layer, stored, source)
    except QgateError:
        return None
    if weight is None or weight.shape[1 - axis] != length:
        return None
    values, parent = weight.leading()
    columns = factors(values, parent, 0)
    if axis == 0:
        return name, columns
    norm = _undoing_norm(layer, columns)
    return name, _row_factors(weight, fit_factors(values, parent)[0] if norm is None else norm[1])


def _compared(
    layer: Surroundings, stored: StoredWeight, source: StoredEntry
) -> ComparedRows | None:
    """Return a weight of the child beside the parent's of one name and one shape."""
    if len(source.shape) != 2:
        return None
    shape = source.shape[0], source.shape[1]
    parent = ContiguousRows(layer.parent, source.name, shape[1])
    if stored.packing is not None:
        weight = WeightRows(layer.child, stored, layer.recipe)
        return ComparedRows.of_quantized(weight, parent) if weight.shape == shape else None
    if layer.child.entries[stored.name].shape != shape:
        return None
    values = ContiguousRows(layer.child, stored.name, shape[1])
    return ComparedRows.of_plain(values, parent, shape)


def _row_factors(weight: ComparedRows, columns: Tensor) -> Tensor:
    """Return the factors by which rows were multiplied, after columns were."""
    return torch.cat([factors(values, parent * columns, 1) for values, parent in weight.pairs()])
