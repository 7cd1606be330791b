"""Losses of each format over all tensors, added up in one pass."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

from qgate.summaries.reading import (
    figure_of,
    flushed,
    format_outcomes,
    is_gradient,
    layer_of,
    ratios_db,
    saturated,
    saturation_cost,
)
from qgate.summaries.record import HIDDEN_DB, DumpAnalysis, FormatOutcome, TensorSummary
from qgate.text import percent


def _numbers() -> array[float]:
    return array("d")


@dataclass
class Share:
    """A share of all elements together, and the tensor where it is largest."""

    most: float = 0.0
    tensor: TensorSummary | None = None
    lost: float = 0.0
    of: float = 0.0

    def add(self, share: float, of: float, tensor: TensorSummary) -> None:
        if share > self.most:
            self.most, self.tensor = share, tensor
        if math.isfinite(share) and of > 0:
            self.lost, self.of = self.lost + share * of, self.of + of

    @property
    def of_all(self) -> float:
        return self.lost / self.of if self.of else math.nan


@dataclass
class Saturation:
    """Saturation in one format: the number of tensors, the share of all values, and the cost.

    tensor  the tensor where saturation has most of the squared error
    worst   that part, and the share of its values that saturate
    """

    tensors: int = 0
    values: Share = field(default_factory=Share)
    costs: array[float] = field(default_factory=_numbers)
    worst: tuple[float, float] = (0.0, 0.0)
    tensor: TensorSummary | None = None

    @property
    def mean_cost(self) -> float:
        """The part of the squared error that comes from saturation, in the mean over tensors."""
        return sum(self.costs) / len(self.costs) if self.costs else math.nan


@dataclass
class HiddenLosses:
    """Tensors in which massive elements hide the loss of all others."""

    tensors: int = 0
    layers: set[int | None] = field(default_factory=set)
    worst: TensorSummary | None = None
    ratios: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class FormatSummary:
    """The losses of one format as pages, texts and pictures show them.

    worst        the tensor with the least SQNR
    worst_db     its SQNR, with all elements and without massive ones
    median_db    the same in the median of all tensors
    flushed, saturated  shares of all values
    saturation_cost     the part of the squared error that comes from saturation, in the mean
    by_design    the format saturates by design: it has scales of its own
    """

    name: str
    label: str
    worst: TensorSummary
    worst_db: tuple[float, float]
    median_db: tuple[float, float]
    flushed: float
    saturated: float
    saturation_cost: float
    by_design: bool

    @property
    def least_db(self) -> float:
        return min(self.worst_db)

    @property
    def saturation_text(self) -> str:
        return f"{percent(self.saturation_cost)}{' by design' if self.by_design else ''}"


@dataclass
class FormatLosses:
    """SQNRs of one format, saturated and flushed values, also those of the gradients alone.

    ratios, calm_ratios  SQNRs with all elements, and without massive ones
    worst                the tensor with the least of either, and its two
    """

    ratios: array[float] = field(default_factory=_numbers)
    calm_ratios: array[float] = field(default_factory=_numbers)
    worst: TensorSummary | None = None
    worst_ratios: tuple[float, float] = (math.inf, math.inf)
    saturated: Saturation = field(default_factory=Saturation)
    hidden: HiddenLosses = field(default_factory=HiddenLosses)
    flushed: Share = field(default_factory=Share)
    gradients: Share = field(default_factory=Share)

    def add(self, tensor: TensorSummary, outcome: FormatOutcome) -> None:
        of = figure_of(outcome, "of")
        whole, calm = ratios = ratios_db(outcome)
        if not math.isnan(whole):
            self.ratios.append(whole)
            self.calm_ratios.append(calm)
            if self.worst is None or min(ratios) < min(self.worst_ratios):
                self.worst_ratios, self.worst = ratios, tensor
        if whole - calm > HIDDEN_DB:
            hidden = self.hidden
            hidden.tensors += 1
            hidden.layers.add(layer_of(tensor))
            if hidden.worst is None or calm < hidden.ratios[1]:
                hidden.worst, hidden.ratios = tensor, ratios
        share, cost, own = saturated(outcome), saturation_cost(outcome), self.saturated
        own.values.add(share, of, tensor)
        if math.isfinite(cost):
            own.costs.append(cost)
        if share > 0:
            own.tensors += 1
            worst = (cost if math.isfinite(cost) else 0.0, share)
            if own.tensor is None or worst > own.worst:
                own.worst, own.tensor = worst, tensor
        self.flushed.add(flushed(outcome), of, tensor)
        if is_gradient(tensor):
            self.gradients.add(flushed(outcome), of, tensor)

    def summary(self, name: str, label: str, *, by_design: bool) -> FormatSummary | None:
        if self.worst is None:
            return None
        return FormatSummary(
            name, label, self.worst, self.worst_ratios,
            median_db=(median_high(self.ratios), median_high(self.calm_ratios)),
            flushed=self.flushed.of_all, saturated=self.saturated.values.of_all,
            saturation_cost=self.saturated.mean_cost, by_design=by_design,
        )  # fmt: skip


def share_in(items: Iterable[Any], name: str, share_of: Callable[[FormatOutcome], float]) -> float:
    """Pool a share over the elements of all items; NaN where none has figures of the format."""
    whole = Share()
    for item, outcome in format_outcomes(items, name):
        whole.add(share_of(outcome), figure_of(outcome, "of"), item)
    return whole.of_all


def losses_in(analysis: DumpAnalysis) -> dict[str, FormatLosses]:
    """Add up losses by format, those of the settings first."""
    losses: dict[str, FormatLosses] = {}
    for tensor in analysis["tensors"]:
        for name, outcome in (tensor.get("formats") or {}).items():
            losses.setdefault(name, FormatLosses()).add(tensor, outcome)
    return {
        name: losses[name] for name in dict.fromkeys([*analysis["formats"], *losses])
        if name in losses
    }  # fmt: skip
