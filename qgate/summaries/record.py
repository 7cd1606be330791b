"""The record of a dump's analysis: plain data that computing writes and drawing reads.

Numbers that do not exist (the mean of nothing) are left out, so every number is finite and the
record is JSON. A share is a part of all elements, 0 to 1. `signal` and `noise` are sums of squares
of the values and of the differences from them, so that those of many tensors add up; the SQNR is
10 log10(signal / noise), and noise 0 is exact. Sequences of many records may be on disk
(`qgate.results.rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

ANALYSIS = "qgate dump analysis 2"
"""Kind and version of the record; no other is read."""
HIDDEN_DB = 6.0
"""A difference beyond which massive elements hide the errors of all others."""


class Edges(TypedDict):
    """The range of a format or dtype; a `scaled` one has scales of its own, and `granularity` names
    the elements that share one, where the format does not."""

    max: float
    min_normal: float
    min_subnormal: float
    scaled: bool
    granularity: NotRequired[str]


class FormatOutcome(TypedDict):
    """The outcome of a format for values that are cast as they are, or with its own scales.

    Shares are of the finite elements (`qgate.formats.losses` has the definitions).

    upper, lower   saturated, by sign: above the largest value when rounded without a bound
    underflow      not zero, and below its smallest normal number
    flushed        not zero before, and zero after
    beyond_range   of a cast: share of all elements beyond its range, infinities among them
    saturated_error_share  the share of saturated elements in `noise`
    of             elements that were measured: all counted ones, or a seeded sample of their rows,
                   from which the sums of all are estimated
    fitted_signal, fitted_noise  with the one power of two as scale that loses least
    rest_signal, rest_noise, fitted_rest_noise  without massive elements, if requested
    """

    upper: float
    lower: float
    underflow: float
    flushed: float
    beyond_range: NotRequired[float]
    signal: float
    noise: float
    saturated_error_share: NotRequired[float]
    of: int
    fitted_signal: NotRequired[float]
    fitted_noise: NotRequired[float]
    rest_signal: NotRequired[float]
    rest_noise: NotRequired[float]
    fitted_rest_noise: NotRequired[float]


class Histogram(TypedDict):
    """Counts of equal bins from `low` to `high`, each of whole steps of the values' grid."""

    low: float
    high: float
    counts: list[int]


class Binades(TypedDict):
    """Counts of values from each power of two to the next; `first` is the first exponent."""

    first: int
    counts: list[int]


class Usage(TypedDict):
    """bf16 exponents (of 256) and patterns (of 65,536) that occur; the entropy of exponents."""

    exponents: int
    patterns: int
    exponent_bits: float


class Channels(TypedDict):
    """Largest magnitudes of channels: their median, the largest with their indices, and the curve
    of all in descending order at up to 65 evenly spaced points."""

    count: int
    median: float
    largest: list[tuple[int, float]]
    curve: list[float]


class Fit(TypedDict):
    """A distribution fitted by maximum likelihood; `log_likelihood` is the mean per value."""

    location: float
    scale: float
    log_likelihood: float
    freedom: NotRequired[float]


class ValueSummary(TypedDict):
    """The distribution of one tensor, or of several pooled.

    tensors     how many
    elements    of all of them; `counted` are those that shares, moments and quantiles are of
    source      values, counts, or statistics (of which there are only the extremes and moments)
    counted_as  the dtype whose patterns were counted (bfloat16, float16; empty where nothing was);
                wider tensors were rounded to it, and their ends, mean, std, rms, zeros and
                non-finite values are exact all the same
    kurtosis    less three: 0 for a normal distribution
    quantiles   by probability as text: "0", "0.001", "0.01", "0.05", "0.25", "0.5" … "1"
    formats     by name of a format or dtype
    """

    tensors: int
    elements: int
    counted: int
    source: str
    counted_as: str
    nan: int
    posinf: int
    neginf: int
    zeros: NotRequired[int]
    min: NotRequired[float]
    max: NotRequired[float]
    amax: NotRequired[float]
    amin: NotRequired[float]
    mean: NotRequired[float]
    std: NotRequired[float]
    rms: NotRequired[float]
    skew: NotRequired[float]
    kurtosis: NotRequired[float]
    quantiles: NotRequired[dict[str, float]]
    binades: NotRequired[Binades]
    usage: NotRequired[Usage]
    channels: NotRequired[Channels]
    formats: NotRequired[dict[str, FormatOutcome]]


class TensorSummary(ValueSummary):
    """One tensor of the dump; the fields after its title are those of its record."""

    title: str
    order: int
    module: str
    layer_type: str
    layer: int | None
    operation: str
    phase: str
    component: str
    name: str
    quant_type: str
    rank: int
    iteration: int | None
    sample: int | None
    micro_batch: int | None
    call: int
    shape: list[int]
    dtype: str


class GroupSummary(ValueSummary):
    """All tensors that have these fields in common, pooled.

    histogram  over all finite values; `core` over those between the quantiles 0.001 and 0.999; from
               and to the ends of the bins that these are in
    qq         `values` are the quantiles at the probabilities `p`, `normal` those of the standard
               normal distribution
    fits       by name: normal, laplace, student_t; `best` is the likeliest by the Bayesian
               information criterion, which counts one parameter more against it
    """

    layer_type: str
    operation: str
    name: str
    quant_type: str
    dtype: str
    histogram: NotRequired[Histogram]
    core: NotRequired[Histogram]
    qq: NotRequired[dict[str, list[float]]]
    fits: NotRequired[dict[str, Fit]]
    best: NotRequired[str]


class Pair(TypedDict):
    """The same tensor under two quant types (`actual` of the second, `reference` of the first), or
    in two formats."""

    title: str
    layer: int | None
    layer_type: str
    operation: str
    name: str
    rank: int
    correlation: NotRequired[float]
    relative_mse: NotRequired[float]
    elements: int


class Scatter(TypedDict):
    """A grid of counts of pairs: `counts[i][j]` is reference bin i, actual bin j.

    low, high  ends of both axes, in `unit`
    outside    pairs that are not in it
    """

    low: float
    high: float
    counts: list[list[int]]
    outside: int
    unit: NotRequired[str]


class FormatComparison(TypedDict):
    """Two quant types of the dump or two formats, side by side.

    kind      quant_types or formats
    unpaired  tensors of either side without a counterpart
    """

    kind: str
    first: str
    second: str
    pairs: Sequence[Pair]
    unpaired: int
    scatter: NotRequired[Scatter]


class LossScale(TypedDict):
    """Powers of two for the loss, by their exponents: the least at which at most 0.1 % of the
    gradients that are not zero are flushed, and the largest at which none saturates. The one
    advised is between them and nearest to none; of a tapered format, among those that lose no more
    than 0.1 dB against the best.
    `flush` is the share that is flushed without one, `at_best` with the advised one."""

    format: str
    least: int
    largest: int
    advised: int
    flush: float
    at_best: float


class RankRow(TypedDict):
    """One rank against the median of all; `score` is how far it stands out of their spread."""

    rank: int
    tensors: int
    nonfinite: int
    amax: NotRequired[float]
    rms: NotRequired[float]
    distance: NotRequired[float]
    score: NotRequired[float]


class RankTensor(TypedDict):
    """A tensor that several ranks have: its root mean squares by rank, as text, and how far the
    farthest is from the median of all, as a factor from 1."""

    title: str
    rms: dict[str, float]
    amax: dict[str, float]
    factor: float
    farthest: int
    equal: bool


class PeerCell(TypedDict):
    """A layer of one rank or sample against its peers.

    member  the rank or the sample
    ratio   how far its tensors are from those of the others, in the mean, in units of what is usual
            for tensors of their kind; `most` is that of the farthest
    log2    powers of two from the rms of the others to that of the farthest tensor; `title` names
            it where the cell stands out
    """

    layer: int | None
    member: int
    ratio: float
    most: float
    tensors: int
    stands_out: bool
    log2: float
    title: NotRequired[str]


class Ranks(TypedDict):
    """Ranks against each other; `cells` has them by layer."""

    rows: list[RankRow]
    tensors: Sequence[RankTensor]
    stands_out: int | None
    equal_weights: int
    unequal_weights: list[str]
    cells: NotRequired[list[PeerCell]]


class Map(TypedDict):
    """A tensor as a picture: the largest magnitude of each cell, of which there are at most 96 by
    96; `kind` is tokens (rows × channels) or attention (queries × keys, mean over heads); `rows`
    and `columns` are those of the tensor."""

    title: str
    kind: str
    rows: int
    columns: int
    cells: list[list[float]]
    order: int
    rank: int
    entropy_bits: NotRequired[float]
    first_key: NotRequired[float]
    row_name: NotRequired[str]
    """What the rows are, if they are no tokens."""


class AnalysisSettings(TypedDict, total=False):
    """Settings of an analysis; `of_tensors` counts the tensors of which a share was taken."""

    formats: list[str]
    compare: list[str] | None
    wanted: dict[str, str]
    rows: int
    most: int | None
    seed: int
    of_tensors: int


class DumpAnalysis(TypedDict):
    """All of it.

    dump        totals of the dump, as `qgate dumps info` has them
    formats     edges by name of a format or dtype
    settings    what the analysis was asked for
    samples     samples of one iteration against each other, by layer
    notes       what a reader should know: what is missing, rounded, sampled
    """

    kind: str
    dump: dict[str, Any]
    settings: AnalysisSettings
    formats: dict[str, Edges]
    notes: list[str]
    tensors: Sequence[TensorSummary]
    groups: list[GroupSummary]
    comparison: FormatComparison | None
    loss_scales: list[LossScale]
    ranks: Ranks | None
    samples: NotRequired[list[PeerCell]]
    maps: list[Map]
