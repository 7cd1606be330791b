"""What can be read from a tensor's values and how often each occurs."""

from __future__ import annotations

import abc
import math

import numpy as np
import numpy.typing as npt

from qgate.errors import QgateError, unknown

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def require_percentile(q: float, of: str) -> None:
    if not 0 <= q <= 100:
        raise QgateError(f"percentile {q} is not allowed; it is from 0 to 100.")
    if of not in ("value", "magnitude"):
        raise unknown("of", of, ("value", "magnitude"))


class Summary(abc.ABC):
    """Exact statistics of the finite values; NaN and the infinities are counted apart."""

    n: int
    """All elements."""
    nan: int
    posinf: int
    neginf: int

    @abc.abstractmethod
    def weighted(self) -> tuple[Floats, Ints]:
        """Distinct finite values, ascending, and how often each occurs."""

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
    def mean(self) -> float:
        values, weights = self.weighted()
        # Dividing first keeps the sum of huge float64 values finite.
        return float(np.dot(values, weights / max(self.finite, 1))) if len(values) else math.nan

    @property
    def unit(self) -> float:
        """The power of two next to amax; in units of it no square of a moment overflows."""
        amax = self.amax
        return 2.0 ** min(math.frexp(amax)[1], 1023) if amax > 0 else 1.0

    def scaled_moment(self, order: int, spread: float = 1.0) -> float:
        """The mean of ((x - mean) / unit / spread)**order."""
        values, weights = self.weighted()
        if not len(values):
            return math.nan
        unit = self.unit
        return float(
            np.dot(((values / unit - self.mean / unit) / spread) ** order, weights / self.finite)
        )

    def moment(self, order: int) -> float:
        """The central moment, divided by the number of values."""
        with np.errstate(over="ignore"):
            return float(np.float64(self.unit) ** order * self.scaled_moment(order))

    @property
    def std(self) -> float:
        """The standard deviation of the values as a population."""
        return math.sqrt(self.scaled_moment(2)) * self.unit if self.finite else math.nan

    @property
    def skew(self) -> float:
        """The third standardized moment; NaN for a constant."""
        return self._standardized(3)

    @property
    def kurtosis(self) -> float:
        """The fourth standardized moment less three: 0 for a normal distribution."""
        return self._standardized(4) - 3

    def _standardized(self, order: int) -> float:
        spread = self.std / self.unit
        return self.scaled_moment(order, spread) if spread > 0 else math.nan

    def percentile(self, q: float, *, of: str = "value") -> float:
        """As numpy's, linear between neighbors; `of` is "value" or "magnitude"."""
        require_percentile(q, of)
        values, weights = self.weighted()
        if of == "magnitude":
            sizes, place = np.unique(np.abs(values), return_inverse=True)
            values, weights = sizes, np.bincount(place, weights).astype(np.int64)
        if not len(values):
            return math.nan
        position = (self.finite - 1) * (q / 100)
        ends = np.cumsum(weights)
        low = values[np.searchsorted(ends, math.floor(position), side="right")]
        high = values[np.searchsorted(ends, math.ceil(position), side="right")]
        part = position - math.floor(position)
        return float(low if part == 0 else low + (high - low) * part)

    def histogram(
        self, bins: int = 100, range: tuple[float, float] | None = None
    ) -> tuple[Ints, Floats]:
        """As numpy's: counts and edges."""
        values, weights = self.weighted()
        found, edges = np.histogram(values, bins=bins, range=range, weights=weights)
        return found.astype(np.int64), edges.astype(np.float64)

    def log2_histogram(self) -> dict[int, int]:
        """How many values there are from each power of two to the next, by exponent."""
        values, weights = self.weighted()
        exponents = np.frexp(np.abs(values))[1] - 1
        kept = values != 0
        return {
            int(e): int(weights[kept][exponents[kept] == e].sum())
            for e in np.unique(exponents[kept])
        }
