"""The record of an analysis of activations and weights: plain data between computing and drawing.

Numbers that do not exist are left out, so every number is finite. A vector is reduced from the
magnitudes of one tensor: over its channels (one number per token), over its tokens (one per
channel), or not at all; a figure of it is the mean over the samples that reached the layer.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from qgate.summaries.record import Histogram, ValueSummary

ACTIVATIONS = "qgate activations 2"
"""Kind and version of the record; no other is read."""
PER_TENSOR = " per tensor"
"""Ending of a format that has one scale per tensor here, and one per row in its mode."""
EXACT_DB = 320.0
"""The SQNR of an exact result in a record, where infinity has no place."""


class Magnitude(TypedDict):
    """Figures of a vector of magnitudes: its three largest (`top`), lower median and three smallest
    (`low`). `most` is the largest of any sample."""

    top: list[float]
    median: float
    low: list[float]
    most: float


class Token(TypedDict):
    """A token or an element of a sample, with the text of the token where it can be decoded."""

    sample: int
    position: int
    value: float
    channel: NotRequired[int]
    ratio: NotRequired[float]
    text: NotRequired[str]


class Channel(TypedDict):
    """A channel that stands out: its largest magnitude, that over the median channel's, and the
    shares of tokens and of samples in which it does. Smoothing or a rotation removes a `systematic`
    one, which stands out in many tokens and samples."""

    channel: int
    amax: float
    ratio: float
    tokens: float
    samples: float
    systematic: bool


class Outliers(TypedDict):
    """Outlier tokens, channels and elements of a layer.

    threshold      of quant-smooth-ana's rule: the largest magnitude of a token over the lower
                   median of those of all tokens of its sample
    counts         tokens above it, one number per sample; `undefined` samples have median 0
    positions      outlier tokens at each position in the sequence, as text
    tokens         the worst of them; `texts` has the number of outlier tokens by text
    max_over_rms   largest magnitude over root mean square; `channel_ratio` largest channel over
                   the median one; `token_ratio` the largest of that rule
    channels       channels that stand out, the worst first; `massive` single elements that do
    """

    threshold: float
    counts: list[int]
    mean_count: float
    undefined: int
    positions: dict[str, int]
    tokens: list[Token]
    texts: NotRequired[dict[str, int]]
    max_over_rms: NotRequired[float]
    channel_ratio: NotRequired[float]
    token_ratio: NotRequired[float]
    channels: list[Channel]
    massive: list[Token]


class ChannelRanges(TypedDict):
    """Percentiles of the signed values of each channel, pooled over samples and tokens: one list
    per percentile, as text, with a number per channel. `error` bounds the relative error of all
    but the `exact` ones; magnitudes below 2^-20 of the largest value count as zero."""

    percentiles: dict[str, list[float]]
    error: float
    exact: NotRequired[list[str]]


class HeatMap(TypedDict):
    """Magnitudes of one sample: the largest of each cell, tokens by channels."""

    sample: int
    tokens: int
    channels: int
    cells: list[list[float]]
    stats: dict[str, float]


class Smoothed(TypedDict):
    """Smoothing advice of a layer in one format: SQNR of the layer's output as it is, with the best
    migration strength, and after a Hadamard rotation. `curve` is the SQNR by strength, as text."""

    format: str
    alpha: float
    before_db: float
    after_db: float
    hadamard_db: NotRequired[float]
    curve: dict[str, float]


class Massive(TypedDict):
    """Elements that hide the errors of all others: the magnitude they exceed, and their number."""

    beyond: float
    elements: int


class LayerActivations(TypedDict):
    """One module in one role.

    samples, calls, tokens   that reached it; `coverage` is samples over all there were
    portrait                the distribution of all values, with what formats do to it
    massive                  elements that errors are told without too, where there are any
    rounding                 the largest relative error of the quantiles and of the median of all
                             magnitudes, where values were rounded to be counted; all other figures
                             are of the values themselves
    """

    module: str
    role: str
    layer: int | None
    kind: str
    width: int
    samples: int
    calls: int
    tokens: int
    coverage: float
    portrait: ValueSummary
    massive: NotRequired[Massive]
    rounding: NotRequired[float]
    histogram: NotRequired[Histogram]
    magnitude: NotRequired[dict[str, Magnitude]]
    outliers: NotRequired[Outliers]
    ranges: NotRequired[ChannelRanges]
    heat_map: NotRequired[HeatMap]
    smoothing: NotRequired[list[Smoothed]]
    raw: NotRequired[dict[str, list[float]]]


class Sensitive(TypedDict):
    """One layer quantized alone: the SQNR of its own output and of the model's, with and without
    massive elements, and the change of the loss."""

    module: str
    format: str
    local_sqnr_db: NotRequired[float]
    local_sqnr_db_without_massive: NotRequired[float]
    sqnr_db: NotRequired[float]
    sqnr_db_without_massive: NotRequired[float]
    loss_change: NotRequired[float]


class Proposal(TypedDict):
    """The fewest layers to keep in higher precision so that the model reaches a target."""

    format: str
    target: str
    reached: bool
    keep: list[str]
    value: float
    all_quantized: float
    curve: list[tuple[int, float]]


class ActivationsRecord(TypedDict):
    """The record of a run.

    settings  that differ from the defaults; `data` is the source of the samples
    panels    layers by the pattern that matched them, for each kind of picture
    """

    kind: str
    model: str
    architecture: str
    device: str
    versions: dict[str, str]
    settings: dict[str, Any]
    data: dict[str, Any]
    notes: list[str]
    seconds: dict[str, float]
    layers: list[LayerActivations]
    panels: dict[str, dict[str, list[str]]]
    sensitivity: list[Sensitive]
    proposals: list[Proposal]
