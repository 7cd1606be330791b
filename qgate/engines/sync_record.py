"""The record of a sync: whether an engine holds the weights that its trainer has."""

from __future__ import annotations

from dataclasses import dataclass, field

from qgate.charts.overviews import Overview, Overviewed
from qgate.records.plain_data import plain_data

KIND = "qgate engine sync 1"


@dataclass(frozen=True)
class WeightFinding:
    """A weight on a rank of the engine that is not the trainer's.

    relation  "stale" (that of an earlier step), "another" (that of another weight), "differs", or
              "near" (codes next to the nearest ones)
    step      of the trainer whose weight it is; None where no step is known
    holds     what it is instead, in words
    rows      rows that differ, as a text; empty for all
    sampled    elements that were compared; differing: those that are not the trainer's
    """

    name: str
    rank: int
    relation: str
    step: int | None
    holds: str
    rows: str
    sampled: int
    differing: int
    relative_error: float | None = None


@dataclass(frozen=True)
class StaleGroup:
    """Findings of one kind together: how many weights of how many there.

    where  with its preposition: on a rank, in a layer, in an expert, in a weight
    """

    relation: str
    step: int | None
    where: str
    weights: int
    total: int


@dataclass(frozen=True)
class ModuleDistance:
    """The relative MSE of a module's output, sampled, over the tokens of a request."""

    name: str
    relative_mse: float


@dataclass(repr=False)
class SyncRecord(Overviewed):
    """An engine beside the trainer whose weights it was given.

    step      of the trainer that the engine should have; steps: all that it was compared with
    exact     weights, by rank, that are the trainer's bit for bit; nearest: whose codes are nearest
    alone     weights of the engine that the trainer has not, and the other way around
    unread    weights that the probe could not read, with the reasons
    begins    the module at which outputs begin to differ, in words; empty for none
    beyond    limits that are exceeded, in words
    """

    trainer: str
    engine: str
    step: int | None = None
    steps: list[int] = field(default_factory=list)
    exact: int = 0
    nearest: int = 0
    groups: list[StaleGroup] = field(default_factory=list)
    findings: list[WeightFinding] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    modules: list[ModuleDistance] = field(default_factory=list)
    begins: str = ""
    k3: float | None = None
    tokens: int = 0
    beyond: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kind: str = KIND

    @property
    def wrong(self) -> list[WeightFinding]:
        """Return the findings that rounding does not explain."""
        return [finding for finding in self.findings if finding.relation != "near"]

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.beyond)

    def overview(self) -> Overview:
        """Describe the sync: groups of findings, and each of them."""
        title = f"{self.engine} beside {self.trainer}: {len(self.wrong)} weights differ"
        rows = [
            {"weight": f.name, "rank": f.rank, "it is": f.relation, "step": f.step}
            for f in self.findings
        ]
        return Overview(title, rows, noun="weight", lines=[*self.beyond, *self.notes])

    def to_dict(self) -> dict[str, object]:
        """Return the record as plain data; numbers that are not finite are None."""
        return plain_data(self)
