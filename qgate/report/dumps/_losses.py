"""What formats lose of all tensors, added up in one pass over them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from qgate.report.dumps._reading import fates, figure_of, flushed, is_gradient, saturated, sqnr_db
from qgate.results.portraits import DumpAnalysis, Fate, TensorPortrait


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
class Losses:
    """Of one format: SQNRs, what saturates, and what becomes zero, also of the gradients alone."""

    ratios: array[float] = field(default_factory=lambda: array("d"))
    worst: TensorPortrait | None = None
    worst_db: float = math.inf
    saturated: Share = field(default_factory=Share)
    flushed: Share = field(default_factory=Share)
    gradients: Share = field(default_factory=Share)

    def add(self, tensor: TensorPortrait, fate: Fate) -> None:
        ratio, of, lost = sqnr_db(fate), figure_of(fate, "of"), flushed(fate)
        if not math.isnan(ratio):
            self.ratios.append(ratio)
            if self.worst is None or ratio < self.worst_db:
                self.worst_db, self.worst = ratio, tensor
        self.saturated.add(saturated(fate), of, tensor)
        self.flushed.add(lost, of, tensor)
        if is_gradient(tensor):
            self.gradients.add(lost, of, tensor)

    @property
    def median_db(self) -> float:
        return sorted(self.ratios)[len(self.ratios) // 2]


def share_in(items: Iterable[Any], name: str, what: Callable[[Fate], float]) -> float:
    """A share of the elements of all items together; NaN where none has figures of the format."""
    whole = Share()
    for item, fate in fates(items, name):
        whole.add(what(fate), figure_of(fate, "of"), item)
    return whole.of_all


def losses_in(analysis: DumpAnalysis) -> dict[str, Losses]:
    """By format, those of the settings first."""
    found: dict[str, Losses] = {}
    for tensor in analysis["tensors"]:
        for name, fate in (tensor.get("formats") or {}).items():
            found.setdefault(name, Losses()).add(tensor, fate)
    known = [name for name in analysis["formats"] if name in found]
    return {name: found[name] for name in dict.fromkeys([*known, *found])}
