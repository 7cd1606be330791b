"""What a record carries of its tensors, so that they can be drawn when they are gone.

`record["pictures"]` is a list of these, each named by its `kind`. They are only shown: no verdict
depends on them. Numbers are finite; sizes are bounded, whatever the size of the tensors.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

Plots = Literal["failed", "worst", "all", "none"]
PLOTS: tuple[Plots, ...] = ("failed", "worst", "all", "none")


class ErrorBins(TypedDict):
    """A histogram of actual minus reference: equal bins from -edge to edge, and what is beyond.

    Where all errors are zero, edge is 0 and there is one bin.
    """

    edge: float
    counts: list[int]
    below: int
    above: int


class Density(TypedDict):
    """How often actual and reference have which values, on a square of `size` by `size` cells.

    Both axes are asinh(x / rms), from -edge to edge; `cells` are reference column, actual row,
    count, three numbers per cell that is not empty; rows and columns count from the lowest value.
    """

    size: int
    edge: float
    cells: list[int]


class WorstChannel(TypedDict):
    """A channel of the last axis: its share of the squared error, and its own relative MSE."""

    index: int
    share: float
    relative_mse: float | None


class Octaves(TypedDict):
    """Where the error sits: by the magnitude of the reference, in octaves of its rms.

    Octave k holds the elements with 2^(low+k) <= |reference| / rms < 2^(low+k+1), the first one
    also all smaller ones and zeros. `error` and `energy` are shares of the squared error and of
    the squared reference, `elements` counts.
    """

    low: int
    error: list[float]
    energy: list[float]
    elements: list[int]


class ErrorPicture(TypedDict):
    """Actual against reference at one site; of large tensors `sampled` of all `elements`."""

    kind: Literal["errors"]
    elements: int
    sampled: int
    rms: float
    bins: ErrorBins
    density: Density
    octaves: Octaves
    channels: NotRequired[list[WorstChannel]]
    channel_count: NotRequired[int]


class SweepPicture(TypedDict):
    """The error of a format over its scale exponents: `levels` are exponent and relative MSE."""

    kind: Literal["sweep"]
    format: str
    levels: list[tuple[float, float]]
    recommended: float
    accepted: float | None


class MagnitudePicture(TypedDict):
    """Where magnitudes lie, in octaves: `counts[k]` elements have 2^(low+k) <= |x| < 2^(low+k+1).

    `largest` and `smallest` are the ends of the format's range, as log2, where one is asked about;
    `saturated` and `flushed` count what it clips and what it makes zero.
    """

    kind: Literal["magnitudes"]
    format: str
    low: int
    counts: list[int]
    zeros: int
    nonfinite: int
    largest: float | None
    smallest: float | None
    saturated: int
    flushed: int


Picture = ErrorPicture | SweepPicture | MagnitudePicture
