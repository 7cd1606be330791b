"""Statistics from a tensor's values and how often each occurs."""

from __future__ import annotations

import abc
import math
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from qgate.errors import QgateError, unknown
from qgate.stats.moments import PowerSums

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
N = TypeVar("N", np.float64, np.int64)


def require_percentile(q: float, of: str) -> None:
    if not 0 <= q <= 100:
        raise QgateError(f"percentile {q} is not allowed; it is from 0 to 100.")
    if of not in ("value", "magnitude"):
        raise unknown("of", of, ("value", "magnitude"))


def quantiles_of(values: Floats, weights: Ints, probabilities: npt.ArrayLike) -> Floats:
    """Return quantiles as numpy's, linear between neighbors, of ascending values with weights."""
    ends = np.cumsum(weights)
    position = (int(ends[-1]) - 1) * np.asarray(probabilities, dtype=np.float64)
    below = np.floor(position)
    low = values[np.searchsorted(ends, below, side="right")]
    high = values[np.searchsorted(ends, np.ceil(position), side="right")]
    return np.asarray(low + (high - low) * (position - below))


def distinct(values: npt.NDArray[N], weights: Ints) -> tuple[npt.NDArray[N], Ints]:
    """Return the distinct values, ascending, and how often each occurs."""
    unique, inverse = np.unique(values, return_inverse=True)
    counts = np.zeros(len(unique), dtype=np.int64)
    np.add.at(counts, inverse, weights)
    return unique, counts


class Summary(abc.ABC):
    """Exact statistics of the finite values; NaN and the infinities are counted apart."""

    n: int
    """The number of all elements."""
    nan: int
    posinf: int
    neginf: int

    @abc.abstractmethod
    def weighted(self) -> tuple[Floats, Ints]:
        """Return distinct finite values, ascending, and how often each occurs."""

    @cached_property
    def moments(self) -> PowerSums:
        """The exact sums of powers of the finite values, of at most 11 digits each."""
        return PowerSums.of_counts(*self.weighted())

    @cached_property
    def _figures(self) -> dict[str, float]:
        return self.moments.figures()

    @property
    def _mean_and_std(self) -> dict[str, float]:
        return self._figures

    @property
    def finite(self) -> int:
        return self.n - self.nan - self.posinf - self.neginf

    @property
    def zeros(self) -> int:
        values, weights = self.weighted()
        return int(weights[values == 0].sum())

    @property
    def min(self) -> float:
        values, _ = self.weighted()
        return float(values[0]) if len(values) else math.nan

    @property
    def max(self) -> float:
        values, _ = self.weighted()
        return float(values[-1]) if len(values) else math.nan

    @property
    def amax(self) -> float:
        """The largest finite magnitude."""
        return max(abs(self.min), abs(self.max))

    @property
    def amin(self) -> float:
        """The smallest magnitude that is not zero; NaN if there is none."""
        values, _ = self.weighted()
        sizes = np.abs(values[values != 0])
        return float(sizes.min()) if len(sizes) else math.nan

    @property
    def unit(self) -> float:
        """The power of two next to amax; in units of it no square of a moment overflows."""
        amax = self.amax
        return 2.0 ** min(math.frexp(amax)[1], 1023) if amax > 0 else 1.0

    @property
    def mean(self) -> float:
        return self._mean_and_std.get("mean", math.nan)

    @property
    def std(self) -> float:
        """The standard deviation of the values as a population."""
        return self._mean_and_std.get("std", math.nan)

    @property
    def skew(self) -> float:
        """The third standardized moment; NaN for a constant."""
        return self._figures.get("skew", math.nan)

    @property
    def kurtosis(self) -> float:
        """The fourth standardized moment less three: 0 for a normal distribution."""
        return self._figures.get("kurtosis", math.nan)

    def percentile(self, q: float, *, of: str = "value") -> float:
        """Return a percentile as numpy's, linear between neighbors, of "value" or "magnitude"."""
        require_percentile(q, of)
        values, weights = self.weighted()
        if of == "magnitude":
            values, weights = distinct(np.abs(values), weights)
        return float(quantiles_of(values, weights, q / 100)) if len(values) else math.nan

    def histogram(
        self, bins: int = 100, range: tuple[float, float] | None = None
    ) -> tuple[Ints, Floats]:
        """Return counts and edges as numpy does."""
        values, weights = self.weighted()
        counts, edges = np.histogram(values, bins=bins, range=range, weights=weights)
        return counts.astype(np.int64), edges.astype(np.float64)

    def log2_histogram(self) -> dict[int, int]:
        """Count the values from each power of two to the next, by exponent."""
        values, weights = self.weighted()
        nonzero = values != 0
        exponents, counts = distinct(np.frexp(values[nonzero])[1] - 1, weights[nonzero])
        return {int(e): int(n) for e, n in zip(exponents, counts, strict=True)}


class SummaryOfKinds(Summary):
    """A summary that counts NaN, Inf and -Inf in one pass, when one of them is read."""

    @property
    @abc.abstractmethod
    def _kinds(self) -> tuple[int, int, int]: ...

    @property
    def nan(self) -> int:  # type: ignore[override]
        return self._kinds[0]

    @property
    def posinf(self) -> int:  # type: ignore[override]
        return self._kinds[1]

    @property
    def neginf(self) -> int:  # type: ignore[override]
        return self._kinds[2]
