"""Children whose weights were quantized and stored as floats again: "fake quantized".

Codes and scales are found again from the values: those of one group lie on a grid, whose largest
element is one of the last codes of the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from qgate.checkpoints.accounting import is_skipped
from qgate.checkpoints.grids import FP4_UNIT, TALL, QuantizedWeight, as_rows
from qgate.checkpoints.ideal import element_range, round_to
from qgate.checkpoints.pairing import ParentMatch, sampled
from qgate.checkpoints.recipes import DeclaredFormat, Recipe
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import MisfitError, Packing, Parts, StoredWeight

PACKING = "dequantized values"
ROUNDED = {torch.bfloat16: 3 * 2.0**-9, torch.float16: 3 * 2.0**-12, torch.float32: 2.0**-19}
"""Largest relative error of values of a dtype, with that of the scale that they tell."""
DTYPES = {
    **{f"int{bits}": torch.int8 for bits in (2, 3, 4, 8)},
    **{f"uint{bits}": torch.uint8 for bits in (2, 3, 4, 8)},
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
FITS = 4
"""How often codes and scale of a group are found from each other."""
FEW = 1 / 64
"""Share of groups without a grid that are single faults of a weight, not another format."""
SAMPLED = 5


def as_declared(
    child: Checkpoint,
    parent: Checkpoint | None,
    weights: Sequence[StoredWeight],
    matches: Mapping[str, ParentMatch],
    recipe: Recipe,
) -> list[StoredWeight]:
    """Read floats as what the recipe declares, if no weight has codes and all differ."""
    declared = {weight.name for weight in weights if is_skipped(weight, recipe)}
    if parent is None or not declared or any(weight.packing for weight in weights):
        return list(weights)
    matched = sorted(name for name in declared if name in matches)[:SAMPLED]
    if not matched or all(_is_parents(child, parent, name, matches[name]) for name in matched):
        return list(weights)
    return [_read_as(weight, recipe) if weight.name in declared else weight for weight in weights]


def _is_parents(child: Checkpoint, parent: Checkpoint, name: str, match: ParentMatch) -> bool:
    """Return True if a tensor has the parent's values, or a cast of them."""
    own, shape = child.read(name), parent.entries[match.names[0]].shape
    if len(match.names) > 1 or match.transposed or own.shape != shape:
        return False
    return torch.equal(sampled(own), sampled(parent.read(match.names[0]).to(own.dtype)))


def _read_as(weight: StoredWeight, recipe: Recipe) -> StoredWeight:
    declared = recipe.format_of(weight.name.removesuffix(".weight"))
    assert declared is not None
    (entry,) = weight.parts.values()
    # The scale of many rows is told by all of them.
    is_low = declared.tile[0] is not None and declared.tile[0] <= TALL
    rows = entry.shape[0] if is_low else 0
    packing = Packing(
        PACKING,
        partial(decode_values, declared),
        by_rows=("weight",),
        count_rows=lambda _checkpoint, _parts: rows,
    )
    return StoredWeight(weight.name, packing, {"weight": entry})


def decode_values(declared: DeclaredFormat, parts: Parts) -> QuantizedWeight:
    """Find the codes and scales of values, which a format has that is declared."""
    stored = parts["weight"]
    values = as_rows(stored).float()
    rows, columns = values.shape
    tile = declared.tile[0] or parts.rows or rows, declared.tile[1] or columns
    blank = QuantizedWeight(declared.element, values, torch.ones(1, 1), tile)
    tiles = blank.in_tiles(values).transpose(1, 2)
    groups = tiles.flatten(2).flatten(0, 1)
    grid = _Grid(declared, ROUNDED[stored.dtype])
    scales, zeros, is_off = grid.fitted(groups)
    if float(is_off.float().mean()) > FEW:
        first = int(is_off.nonzero()[0])
        across = tiles.shape[1]
        row, column = parts.start + first // across * tile[0], first % across * tile[1]
        count = len(groups[first].unique())
        raise MisfitError(
            f"its values are not those of {declared}: {int(is_off.sum()):,} of {len(groups):,} "
            f"groups lie on no grid, first that of row {row} from column {column} on, with "
            f"{count} different values"
        )
    shape = tiles.shape[0], tiles.shape[1]
    scales, zeros = scales.reshape(shape), zeros.reshape(shape)
    weight = replace(blank, scales=scales, zero_points=zeros if declared.has_zero_points else None)
    elements = values / weight.spread(scales) + weight.spread(zeros)
    rounded = round_to(declared.element, elements)
    if declared.element == "fp4_e2m1":
        return replace(weight, elements=(rounded / FP4_UNIT).to(torch.int8), unit=FP4_UNIT)
    return replace(weight, elements=rounded.to(DTYPES.get(declared.element, torch.int16)))


class _Grid:
    """The grids that groups of a format may lie on."""

    def __init__(self, declared: DeclaredFormat, error: float) -> None:
        self._element, self._error = declared.element, error
        self._has_zeros = declared.has_zero_points
        self._low, self._high = element_range(declared.element)

    def fitted(self, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scales and zero points of groups, and which of them lie on no grid."""
        low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
        best = torch.full((len(groups),), torch.inf)
        scales, zeros = torch.ones(len(groups)), torch.zeros(len(groups))
        for number, steps in enumerate(self._steps()):
            if number > 1 and bool((best <= 1).all()):
                break
            reach = high - low if self._has_zeros else torch.maximum(-low, high)
            tried = torch.where(reach > 0, reach / steps, 1.0)
            shift = torch.zeros_like(reach)
            if self._has_zeros:
                shift = (self._low - low / tried).round()
            for _ in range(FITS):
                ratios = groups / tried[:, None] + shift[:, None]
                codes = round_to(self._element, ratios) - shift[:, None]
                energy, product = codes.square().sum(1), (codes * groups).sum(1)
                tried = torch.where((energy > 0) & (product > 0), product / energy, tried)
            room = self._error * (groups.abs() + tried[:, None] / 4)
            worst = ((groups - codes * tried[:, None]).abs() / room.clamp(min=1e-30)).amax(1)
            # A finer grid holds what a coarser one holds, so another has to be much better.
            is_better = worst < torch.where(best > 1, best, best / 4)
            best = torch.where(is_better, worst, best)
            scales = torch.where(is_better, tried, scales)
            zeros = torch.where(is_better, shift, zeros)
        return scales, zeros, best > 1

    def _steps(self) -> list[float]:
        """List the elements that the largest magnitude of a group may have, likely ones first."""
        if not self._element.startswith(("int", "uint")):
            codes = torch.linspace(self._high, self._high / 4, 1 << 10)
            return [float(code) for code in round_to(self._element, codes).unique().flip(0)]
        if self._has_zeros:
            most = int(self._high - self._low)
            return [float(steps) for steps in range(most, most // 2, -1)]
        most = int(self._high)
        return [float(steps) for steps in (most, most + 1, *range(most - 1, most // 2, -1))]
