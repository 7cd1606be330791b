"""The record of one comparison of two engines: figures, the tokens that carry them, and weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from qgate.charts.overviews import Overview, Overviewed
from qgate.records.plain_data import plain_data

KIND = "qgate engines 1"


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens; None where there are too few samples to tell more.

    half_interval   half of its 95 % interval
    standard_error  of the mean, over samples or over runs of tokens
    detectable      the smallest true difference that a paired test tells from none in 80 % of runs
    """

    mean: float
    half_interval: float | None = None
    standard_error: float | None = None
    detectable: float | None = None


@dataclass(frozen=True)
class Spread:
    """Mean, median, upper quantiles and maximum over tokens."""

    mean: float
    median: float
    q99: float
    q999: float
    largest: float


@dataclass(frozen=True)
class CarryingToken:
    """A token that carries much of the difference.

    share  of the sum of k3 over all tokens
    """

    sample: str
    position: int
    token: int
    actual: float
    reference: float
    share: float


@dataclass(frozen=True)
class CarryingSample:
    """A sample with its mean k3 and its share of the sum over all tokens."""

    sample: str
    tokens: int
    k3: float
    share: float


class TokenRow(NamedTuple):
    """Values of one token; None where an engine gives none, or a value is not finite.

    same_best  whether both have the same most likely token there
    """

    sample: str
    position: int
    token: int
    actual: float | None
    reference: float | None
    difference: float | None
    k3: float | None
    kl: float | None
    same_best: bool | None


@dataclass(frozen=True)
class PositionProfile:
    """Sizes of the differences of log-probabilities along the positions of all samples.

    step     positions that one value stands for, from position 1 on
    mean     of the tokens there; None without any
    largest  of the tokens there
    """

    step: int
    mean: tuple[float | None, ...]
    largest: tuple[float | None, ...]


@dataclass(frozen=True)
class SampleDifferences:
    """Differences of log-probabilities along one sample, from position 1 on.

    step         tokens that one value stands for: that of them with the largest magnitude
    share        of the sum of k3 over all tokens
    """

    sample: str
    step: int
    share: float
    differences: tuple[float | None, ...]


@dataclass(frozen=True)
class LimitedFigure:
    """A figure with its limit.

    value   None where the engines do not tell it
    limit   None where none was given
    reason  how it is beyond the limit, in words; empty if it is not
    """

    figure: str
    value: float | None
    limit: float | None
    reason: str = ""


@dataclass(frozen=True)
class SiteDifference:
    """A tensor at which the engines' modules differ.

    origin   "local" where the inputs of its module agree, "carried" from a difference before it,
             "enters" where what came before was not collected, or "unknown"
    """

    site: str
    origin: str
    relative_mse: float | None
    max_abs: float | None


@dataclass(frozen=True)
class WeightDifference:
    """A weight that is not the same in both engines.

    relation  "rounded" (one is the other in fewer bits), "differs", "shape", or on which side alone
    """

    name: str
    relation: str
    dtypes: tuple[str, str]
    relative_error: float | None = None


@dataclass(frozen=True)
class WeightComparison:
    """Equality of the weights that the engines used: how many are equal, rounded, or differ."""

    equal: int = 0
    rounded: int = 0
    differing: int = 0
    differences: tuple[WeightDifference, ...] = ()


@dataclass(frozen=True)
class TokenFigures:
    """Figures over the tokens that both engines scored.

    tokens, samples  that were compared; unscored: tokens that one engine gives nothing for
    equal_share      share of tokens with equal log-probabilities
    difference       log-probability of the actual engine less that of the reference
    magnitude        of these differences
    k3               exp(d) - 1 - d, an estimate of KL(reference, actual) for tokens it drew
    kl               KL(reference, actual) over the whole vocabulary, where there are logits
    ratios           smallest and largest probability ratio of a token
    flips            share of positions with another most likely token; None where not told
    lost, gained     share of positions whose token only the reference, or only the actual engine,
                     finds most likely
    kept             tokens that the actual engine finds most likely over those of the reference
    perplexity_ratio  perplexity of the actual engine over that of the reference
    not_finite       tokens whose log-probability or KL is NaN or infinite; figures leave them out
    """

    samples: int
    tokens: int
    unscored: int
    equal_share: float
    difference: Estimate
    magnitude: Spread
    k3: Estimate
    ratios: tuple[float, float]
    not_finite: int = 0
    kl: Estimate | None = None
    kl_spread: Spread | None = None
    flips: Estimate | None = None
    flip_positions: int = 0
    lost: Estimate | None = None
    gained: Estimate | None = None
    kept: Estimate | None = None
    perplexity_ratio: float = 1.0
    half_carried_by: int = 0
    first_half: float = 0.0
    second_half: float = 0.0
    carriers: tuple[CarryingToken, ...] = ()
    worst_samples: tuple[CarryingSample, ...] = ()


@dataclass(repr=False)
class EnginesRecord(Overviewed):
    """The comparison of two engines on the same tokens.

    first_site  the first tensor that differs while the inputs of its module agree
    sites       tensors that differ: those whose inputs agree first, then the largest differences
    causes      faults that explain the difference of the logits, in words
    limits      figures that may have a limit, with the limits given
    beyond      each limit given that is exceeded, in words
    profile     differences along the positions of samples
    sample_lines  differences along the samples that carry most, where they were asked for
    kind        name and version of this kind of record
    """

    actual: str
    reference: str
    figures: TokenFigures
    weights: WeightComparison | None = None
    first_site: SiteDifference | None = None
    sites_compared: int = 0
    sites_differing: int = 0
    sites: list[SiteDifference] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    limits: list[LimitedFigure] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)
    profile: PositionProfile | None = None
    sample_lines: list[SampleDifferences] = field(default_factory=list)
    kind: str = KIND

    def overview(self) -> Overview:
        """Describe the comparison: figures, what is beyond a limit, and the worst tokens."""
        figures = self.figures
        size, name = (figures.k3, "k3") if figures.kl is None else (figures.kl, "KL")
        title = (
            f"{self.actual} beside {self.reference}: {name} {size.mean:.3g} nats per token over "
            f"{figures.tokens:,} tokens of {figures.samples:,} samples, {figures.equal_share:.3g} "
            "of them equal"
        )
        lines = [*self.beyond, *self.causes, *self.notes]
        rows = [_carrier_row(carrier) for carrier in figures.carriers]
        return Overview(title, rows, noun="token", lines=lines, drawn="share of k3")

    def to_dict(self) -> dict[str, object]:
        """Return the record as plain data; numbers that are not finite are None."""
        return plain_data(self)


def _carrier_row(carrier: CarryingToken) -> dict[str, object]:
    return {
        "place": f"sample {carrier.sample}, position {carrier.position}",
        "token": carrier.token,
        "A": carrier.actual,
        "B": carrier.reference,
        "share of k3": carrier.share,
    }
