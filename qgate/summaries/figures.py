"""The portrait of a pool: the numbers that are read from value counts and exact ends."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from qgate.summaries.ends import in_units
from qgate.summaries.record import Binades, Usage

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
PROBABILITIES = ("0", "0.001", "0.01", "0.05", "0.25", "0.5", "0.75", "0.95", "0.99", "0.999", "1")


def quantiles_of(values: Floats, weights: Ints, probabilities: Floats) -> Floats:
    """As numpy's, linear between neighbors, of ascending values that occur so often."""
    ends = np.cumsum(weights)
    position = (int(ends[-1]) - 1) * probabilities
    below = np.floor(position)
    low = values[np.searchsorted(ends, below, side="right")]
    high = values[np.searchsorted(ends, np.ceil(position), side="right")]
    return np.asarray(low + (high - low) * (position - below))


def moments_of(values: Floats, weights: Ints) -> dict[str, float]:
    """Mean, standard deviation as a population, root mean square, skew, and the kurtosis less
    three; the last two only of what is not constant."""
    n = int(weights.sum())
    if not n:
        return {}
    unit = math.frexp(float(np.abs(values).max()))[1]
    x, part = np.ldexp(values, -unit), weights / n
    mean = float(x @ part)
    centered = x - mean
    std = math.sqrt(float(centered**2 @ part)) if len(values) > 1 else 0.0
    found = {"mean": mean, "std": std, "rms": math.sqrt(float(x**2 @ part))}
    found = {name: in_units(value, unit) for name, value in found.items()}
    if std > 0:
        centered /= std
        square = centered * centered
        found["skew"] = float((square * centered) @ part)
        found["kurtosis"] = float((square * square) @ part) - 3
    return found


def binades_of(values: Floats, weights: Ints) -> Binades | None:
    """By exponent, of the values that are not zero."""
    there = values != 0
    if not there.any():
        return None
    exponents = np.frexp(values[there])[1] - 1
    first = int(exponents.min())
    counts = np.zeros(int(exponents.max()) - first + 1, dtype=np.int64)
    np.add.at(counts, exponents - first, weights[there])
    return Binades(first=first, counts=counts.tolist())


def usage_of(patterns: npt.NDArray[np.uint16], counts: Ints) -> Usage:
    """Of bf16 patterns."""
    fields = np.zeros(256, dtype=np.int64)
    np.add.at(fields, (patterns >> 7) & 0xFF, counts)
    share = fields[fields > 0] / max(int(counts.sum()), 1)
    bits = -float(share @ np.log2(share)) if len(share) > 1 else 0.0
    return Usage(exponents=len(share), patterns=len(patterns), exponent_bits=bits)
