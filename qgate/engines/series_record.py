"""The record of a series: how far apart two engines are at each step, and where that changes."""

from __future__ import annotations

from dataclasses import dataclass, field

from qgate.charts.overviews import Overview, Overviewed
from qgate.records.plain_data import plain_data
from qgate.text.wording import brief

KIND = "qgate engine series 1"


@dataclass(frozen=True)
class StepDistances:
    """Figures of one step over all tokens that both engines scored.

    mean      KL per token where both have logits, else k3
    q99       its upper percentile over tokens
    chi2      mean of (r - 1)^2, where r is the ratio of probabilities of a token
    beyond    share of tokens whose ratio of probabilities is outside 0.8 to 1.25
    quarters  mean k3 in the four quarters of the samples, in the order of positions
    flips     share of positions with another most likely token; None where not told
    """

    step: int
    tokens: int
    samples: int
    mean: float
    half_interval: float | None
    q99: float
    chi2: float
    beyond: float
    largest: float
    quarters: tuple[float, ...]
    flips: float | None = None


@dataclass(frozen=True)
class Drift:
    """A figure that changes at a step.

    first, last  steps between which the change begins with 95 % confidence
    chance       that a series without a drift looks as much like one
    before       median before the change; after: of the steps that follow, of a ramp the last ones
    """

    figure: str
    step: int
    first: int
    last: int
    chance: float
    before: float
    after: float
    is_ramp: bool

    @property
    def rises(self) -> bool:
        return self.after > self.before


@dataclass(frozen=True)
class ModuleGrowth:
    """A tensor of a module whose difference grew first; both are a relative MSE."""

    site: str
    before: float
    after: float


@dataclass(repr=False)
class SeriesRecord(Overviewed):
    """Two engines over the steps of a run.

    is_kl   whether the mean is the KL of logits, and not the estimate k3
    drifts  figures that change: those that rise first, and of them the mean
    module  the first tensor whose difference grew with the drift, where the steps are dumps
    beyond  limits that a step exceeds, in words
    """

    folder: str
    steps: tuple[StepDistances, ...]
    is_kl: bool
    drifts: list[Drift] = field(default_factory=list)
    module: ModuleGrowth | None = None
    beyond: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kind: str = KIND

    @property
    def figure(self) -> str:
        """Return the name of the mean divergence."""
        return "KL" if self.is_kl else "k3"

    @property
    def failed(self) -> bool:
        """Tell whether a figure rises from a step on, or a limit is exceeded."""
        return bool(self.beyond) or any(drift.rises for drift in self.drifts)

    def overview(self) -> Overview:
        """Describe the series: drifts, and the figures of each step."""
        title = f"{self.folder}: {len(self.steps)} steps"
        lines = [
            f"{drift.figure} changes at step {drift.step}: {brief(drift.before)} to "
            f"{brief(drift.after)}"
            for drift in self.drifts
        ]
        rows = [
            {"step": step.step, self.figure: step.mean, "99 %": step.q99} for step in self.steps
        ]
        return Overview(title, rows, noun="step", lines=[*lines, *self.beyond, *self.notes])

    def to_dict(self) -> dict[str, object]:
        """Return the record as plain data; numbers that are not finite are None."""
        return plain_data(self)
