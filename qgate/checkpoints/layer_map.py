"""The map of layers and tensors: how near to its limit each weight is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from qgate.charts.heat import margin_step
from qgate.checkpoints.findings import LIMIT_DB
from qgate.checkpoints.recipe_texts import fold_numbers
from qgate.checkpoints.record import CheckpointFinding, CheckpointRecord, WeightRecord, worst_first
from qgate.text import decibels

NO_LAYER = "–"
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_KEPT = {"equal": "kept as it is", "cast": "cast", "changed": "changed", "undoes": "changed",
         "unmatched": "no parent"}  # fmt: skip


@dataclass
class MapCell:
    """One place of the map: its weights, of experts all, and what was found of them."""

    weights: list[WeightRecord] = field(default_factory=list)
    findings: list[CheckpointFinding] = field(default_factory=list)

    @property
    def worst(self) -> tuple[WeightRecord, float] | None:
        """Return the weight with the most error over ideal."""
        return next(iter(worst_first(self.weights)), None)

    def view(self, anchors: Mapping[str, str]) -> dict[str, str]:
        """Return text, color, words and link of the cell."""
        step, text, words = "", "=", self._kept()
        if self.worst is not None:
            weight, over = self.worst
            # An error that a method makes has no limit.
            step = f"h{margin_step(0.0 if weight.method else max(over, 0.0) / LIMIT_DB)}"
            text = f"{over:.1f}".replace("-0.0", "0.0").replace("-", "−")
            words = f"{weight.name}: {decibels(over, 2)} over ideal, {weight.format}"
            words += f", {weight.method}" if weight.method else ""
        elif any(weight.outcome == "quantized" for weight in self.weights):
            reason = self.weights[0].method or "no parent to compare with"
            text, words = "q", f"{self.weights[0].format}, {reason}"
        elif not self.weights:
            text = ""
        if self.findings:
            words = "; ".join(f"{cell.subject}: {cell.cause}" for cell in self.findings[:3])
        first = self.findings[0].subject if self.findings else ""
        name = first if first in anchors else self.worst[0].name if self.worst else ""
        return {
            "kinds": f"{step}{' bad' * bool(self.findings)}".strip(),
            "link": f"#{anchors.get(name, 'weights')}",
            "title": words,
            "text": text,
            "heard": "finding" * bool(self.findings),
        }

    def _kept(self) -> str:
        outcomes = dict.fromkeys(_KEPT.get(weight.outcome, "") for weight in self.weights)
        formats = dict.fromkeys(weight.format for weight in self.weights)
        return f"{', '.join(formats)}: {', '.join(filter(None, outcomes))}"


@dataclass
class LayerMap:
    """Rows by the name of a tensor without its layer, columns by the number of a layer."""

    columns: list[str]
    rows: list[tuple[str, list[MapCell | None]]]

    @classmethod
    def of(cls, record: CheckpointRecord) -> LayerMap:
        """Sort weights and findings of tensors into rows and columns."""
        cells: dict[str, dict[str, MapCell]] = {}
        subjects = {weight.name for weight in record.weights} | set(record.unmatched_parents)
        for weight in record.weights:
            _cell(cells, weight.name).weights.append(weight)
        for finding in record.findings:
            if finding.subject in subjects:
                _cell(cells, finding.subject).findings.append(finding)
        columns = {column for row in cells.values() for column in row}
        numbers = sorted(columns - {NO_LAYER}, key=int)
        ordered = [*numbers, *([NO_LAYER] if NO_LAYER in columns else [])]
        names = sorted(cells, key=lambda name: (NO_LAYER in cells[name], name))
        start = _common_start([name for name in names if NO_LAYER not in cells[name]])
        return cls(
            ordered,
            [
                (
                    name.removeprefix(start).removesuffix(".weight"),
                    [cells[name].get(column) for column in ordered],
                )
                for name in names
            ],
        )

    def view(self, anchors: Mapping[str, str]) -> Iterator[tuple[str, list[dict[str, str] | None]]]:
        """Yield name and cells of each row, as a template needs them."""
        for name, cells in self.rows:
            yield name, [None if cell is None else cell.view(anchors) for cell in cells]


def _cell(cells: dict[str, dict[str, MapCell]], name: str) -> MapCell:
    match = _LAYER.search(name)
    column = match[1] if match else NO_LAYER
    return cells.setdefault(fold_numbers(name), {}).setdefault(column, MapCell())


def _common_start(names: Sequence[str]) -> str:
    """Return what all names begin with, up to the layer."""
    starts = {name.partition(".*.")[0] for name in names}
    return f"{starts.pop()}.*." if len(starts) == 1 else ""
