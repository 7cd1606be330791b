"""Data of pictures in a record, so that its tensors can be drawn without storing them.

`record["pictures"]` is a list of these, named by `kind`. No verdict depends on them. Numbers are
finite, and sizes do not grow with the tensors.
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict, get_args

from qgate.records import Meta

Plots = Literal["failed", "worst", "all", "none"]
PLOTS: tuple[Plots, ...] = get_args(Plots)
Count = Annotated[int, Meta(ge=0)]


class ErrorBins(TypedDict):
    """A histogram of actual minus reference: equal bins from -edge to edge, and what is beyond.

    Where all errors are zero, edge is 0 and there is one bin.
    """

    edge: float
    counts: list[Count]
    below: Count
    above: Count


class Density(TypedDict):
    """A joint histogram of actual and reference values, on a square of `size` by `size` cells.

    Both axes are asinh(x / rms), from -edge to edge; rows and columns count from the lowest value.

    cells  column of the reference, row of the actual, count, for each cell that is not empty
    """

    size: Count
    edge: float
    cells: list[Count]


class WorstChannel(TypedDict):
    """A channel of the last axis: its share of the squared error, and its own relative MSE."""

    index: Count
    share: float
    relative_mse: float | None


class Octaves(TypedDict):
    """Distribution of the error by magnitude of the reference, in octaves of its rms.

    Octave k holds the elements with 2^(low+k) <= |reference| / rms < 2^(low+k+1), the first one
    also all smaller ones and zeros. `error` and `energy` are shares of the squared error and of
    the squared reference, `elements` counts.
    """

    low: int
    error: list[float]
    energy: list[float]
    elements: list[Count]


class ErrorPicture(TypedDict):
    """Actual against reference at one site; of large tensors `sampled` of all `elements`."""

    kind: Literal["errors"]
    elements: Count
    sampled: Count
    rms: float
    bins: ErrorBins
    density: Density
    octaves: Octaves
    channels: NotRequired[list[WorstChannel]]
    channel_count: NotRequired[Count]


class SweepPicture(TypedDict):
    """The error of a format over its scale exponents.

    levels  scale exponent and relative MSE
    """

    kind: Literal["sweep"]
    format: str
    levels: list[tuple[float, float]]
    recommended: float
    accepted: float | None


class MagnitudePicture(TypedDict):
    """A histogram of magnitudes, in octaves: `counts[k]` have 2^(low+k) <= |x| < 2^(low+k+1).

    `largest` and `smallest` are the ends of the format's range, as log2, where there is one;
    `saturated` and `flushed` count the values that it saturates and flushes.
    """

    kind: Literal["magnitudes"]
    format: str
    low: int
    counts: list[Count]
    zeros: Count
    nonfinite: Count
    largest: float | None
    smallest: float | None
    saturated: Count
    flushed: Count


class LongTextPicture(TypedDict):
    """Loss and divergence of a mode along a long text, in stretches of as many tokens.

    kl         mean KL divergence to the reference, in nats
    bits       mean bits per token, and `reference` those of the reference
    half_95    half of the 95 % interval of the reference's mean
    """

    kind: Literal["long_text"]
    stretch: Count
    kl: list[float]
    bits: list[float]
    reference: list[float]
    half_95: list[float]


LONG_TEXT = "long_text"
"""The site of a mode's figures along one long text."""
_NOISE_BITS = 1e-4

Picture = ErrorPicture | SweepPicture | MagnitudePicture | LongTextPicture


def predicted_tokens(picture: LongTextPicture) -> int:
    """Count the tokens before the loss leaves the interval of the reference's for good.

    It has left it in a stretch if its mean there is above the 95 % interval of the reference's
    mean, by more than float noise.
    """
    pairs = zip(picture["reference"], picture["half_95"], strict=True)
    highest = [mean + half + _NOISE_BITS for mean, half in pairs]
    within = [b <= high for b, high in zip(picture["bits"], highest, strict=True)]
    last = max((number for number, is_within in enumerate(within, 1) if is_within), default=0)
    return last * picture["stretch"]
