"""What formats lose of all tensors, added up in one pass over them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from qgate.summaries.reading import (
    fates,
    figure_of,
    flushed,
    is_gradient,
    layer_of,
    ratios_db,
    saturated,
    saturation_cost,
)
from qgate.summaries.record import DumpAnalysis, Fate, TensorPortrait

HIDDEN_DB = 6.0
"""An SQNR so far above that without massive elements hides what the others lose."""


@dataclass
class Share:
    """A share of all elements together, and the tensor where it is largest."""

    most: float = 0.0
    tensor: TensorPortrait | None = None
    _found: float = 0.0
    _total: float = 0.0

    def add(self, share: float, of: float, tensor: TensorPortrait) -> None:
        if share > self.most:
            self.most, self.tensor = share, tensor
        if math.isfinite(share) and of > 0:
            self._found, self._total = self._found + share * of, self._total + of

    @property
    def of_all(self) -> float:
        return self._found / self._total if self._total else math.nan


@dataclass
class Saturation:
    """Saturation in one format: in how many tensors, how much of all values, and at what cost.

    worst  the tensor where saturation has most of the squared error, with that part and its share
    """

    tensors: int = 0
    values: Share = field(default_factory=Share)
    costs: array[float] = field(default_factory=lambda: array("d"))
    worst: tuple[float, float] = (0.0, 0.0)
    tensor: TensorPortrait | None = None

    def add(self, tensor: TensorPortrait, fate: Fate) -> None:
        share, cost = saturated(fate), saturation_cost(fate)
        self.values.add(share, figure_of(fate, "of"), tensor)
        if math.isfinite(cost):
            self.costs.append(cost)
        if share > 0:
            self.tensors += 1
            found = (cost if math.isfinite(cost) else 0.0, share)
            if self.tensor is None or found > self.worst:
                self.worst, self.tensor = found, tensor

    @property
    def mean_cost(self) -> float:
        """The part of the squared error that saturation has, in the mean over tensors."""
        return sum(self.costs) / len(self.costs) if self.costs else math.nan


@dataclass
class Hidden:
    """Tensors in which massive elements hide what a format loses of the others."""

    tensors: int = 0
    layers: set[int | None] = field(default_factory=set)
    worst: TensorPortrait | None = None
    ratios: tuple[float, float] = (0.0, 0.0)

    def add(self, tensor: TensorPortrait, whole: float, rest: float) -> None:
        if not whole - rest > HIDDEN_DB:
            return
        self.tensors += 1
        self.layers.add(layer_of(tensor))
        if self.worst is None or rest < self.ratios[1]:
            self.worst, self.ratios = tensor, (whole, rest)


@dataclass
class FormatLosses:
    """Of one format: SQNRs, what saturates, and what becomes zero, also of the gradients alone.

    ratios, rests  SQNRs with all elements, and without massive ones
    worst          the tensor with the least of either, and its two
    """

    ratios: array[float] = field(default_factory=lambda: array("d"))
    rests: array[float] = field(default_factory=lambda: array("d"))
    worst: TensorPortrait | None = None
    worst_ratios: tuple[float, float] = (math.inf, math.inf)
    saturated: Saturation = field(default_factory=Saturation)
    hidden: Hidden = field(default_factory=Hidden)
    flushed: Share = field(default_factory=Share)
    gradients: Share = field(default_factory=Share)

    def add(self, tensor: TensorPortrait, fate: Fate) -> None:
        found, of, lost = ratios_db(fate), figure_of(fate, "of"), flushed(fate)
        if not math.isnan(found[0]):
            self.ratios.append(found[0])
            self.rests.append(found[1])
            self.hidden.add(tensor, *found)
            if self.worst is None or min(found) < min(self.worst_ratios):
                self.worst_ratios, self.worst = found, tensor
        self.saturated.add(tensor, fate)
        self.flushed.add(lost, of, tensor)
        if is_gradient(tensor):
            self.gradients.add(lost, of, tensor)


def median(values: Iterable[float]) -> float:
    """The upper one of two in the middle."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def share_in(items: Iterable[Any], name: str, what: Callable[[Fate], float]) -> float:
    """A share of the elements of all items together; NaN where none has figures of the format."""
    whole = Share()
    for item, fate in fates(items, name):
        whole.add(what(fate), figure_of(fate, "of"), item)
    return whole.of_all


def losses_in(analysis: DumpAnalysis) -> dict[str, FormatLosses]:
    """By format, those of the settings first."""
    found: dict[str, FormatLosses] = {}
    for tensor in analysis["tensors"]:
        for name, fate in (tensor.get("formats") or {}).items():
            found.setdefault(name, FormatLosses()).add(tensor, fate)
    known = [name for name in analysis["formats"] if name in found]
    return {name: found[name] for name in dict.fromkeys([*known, *found])}
