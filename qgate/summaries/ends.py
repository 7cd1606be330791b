"""What is read from one tensor besides its value counts: exact ends, sums, a share of its rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]
_CHUNK = 2**16
_RUNS = 16
_UNIT = 64
"""Blocks of every format fit into runs of this many elements."""


def in_units(value: float, exponent: int) -> float:
    """value * 2**exponent; infinite where float64 ends."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.ldexp(value, exponent))


@dataclass(frozen=True)
class ValueSums:
    """Of n finite values and their squares, in units of a power of two that keeps float64 numbers
    near the ends of their range apart from zero and infinity."""

    n: int = 0
    exponent: int = 0
    total: float = 0.0
    square: float = 0.0

    @staticmethod
    def of(values: Floats, weights: Floats | None = None) -> ValueSums:
        amax = float(np.abs(values).max(initial=0.0))
        exponent = math.frexp(amax)[1]
        exponent = exponent if abs(exponent) > 300 else 0
        v = np.ldexp(values, -exponent) if exponent else values
        if weights is None:
            return ValueSums(v.size, exponent, float(v.sum()), float(v @ v))
        n = int(weights.sum())
        return ValueSums(n, exponent, float(v @ weights), float((v * v) @ weights))

    @staticmethod
    def of_moments(n: int, mean: float, std: float) -> ValueSums:
        unit = math.frexp(max(abs(mean), std))[1]
        unit = unit if abs(unit) > 300 else 0
        m, s = math.ldexp(mean, -unit), math.ldexp(std, -unit)
        return ValueSums(n, unit, n * m, n * (m * m + s * s))

    def __add__(self, other: ValueSums) -> ValueSums:
        if not isinstance(other, ValueSums):
            return NotImplemented
        if not self.square or not other.square:
            more = self if self.square else other
            return ValueSums(self.n + other.n, more.exponent, self.total + other.total, more.square)
        unit = max(self.exponent, other.exponent)
        totals, squares = (
            sum(in_units(getattr(s, name), power * (s.exponent - unit)) for s in (self, other))
            for name, power in (("total", 1), ("square", 2))
        )
        return ValueSums(self.n + other.n, unit, totals, squares)

    def moments(self) -> dict[str, float]:
        """Mean, standard deviation as a population, and root mean square."""
        if not self.n:
            return {}
        mean, square = self.total / self.n, self.square / self.n
        found = {"mean": mean, "std": math.sqrt(max(square - mean * mean, 0.0))}
        found["rms"] = math.sqrt(square)
        return {name: in_units(value, self.exponent) for name, value in found.items()}


@dataclass
class ExactFigures:
    """Exact figures of all elements; low, high and least are NaN where there is none."""

    low: float = math.nan
    high: float = math.nan
    least: float = math.nan
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zeros: int = 0


def chunks_of(x: Tensor) -> Iterator[npt.NDArray[np.floating]]:
    """A contiguous tensor of 32 or 64 bits as flat parts that stay in the cache; views."""
    flat = x.view(-1).numpy()
    for start in range(0, flat.size, _CHUNK):
        yield flat[start : start + _CHUNK]


def ends_and_sums(x: Tensor) -> tuple[ExactFigures, ValueSums]:
    """Of a tensor too wide to be counted as it is."""
    ends, sums = ExactFigures(), ValueSums()
    integer, real = np.dtype(f"u{x.itemsize}"), np.dtype(f"f{x.itemsize}")
    magnitude = np.array(2 ** (8 * x.itemsize - 1) - 1, dtype=integer)
    one = np.array(1, dtype=integer)
    least = int(magnitude)
    for chunk in chunks_of(x):
        part = chunk
        low, high = float(part.min()), float(part.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            ends.nan += int(np.isnan(part).sum())
            ends.posinf += int((part == np.inf).sum())
            ends.neginf += int((part == -np.inf).sum())
            part = part[np.isfinite(part)]
            if not part.size:
                continue
            low, high = float(part.min()), float(part.max())
        # Plus zero, so that of two zeros there is one.
        ends.low = float(np.fmin(ends.low, low + 0.0))
        ends.high = float(np.fmax(ends.high, high + 0.0))
        bits = part.view(integer) & magnitude
        ends.zeros += bits.size - int(np.count_nonzero(bits))
        # Zero minus one is the largest integer, so the least is that of the others.
        least = min(least, int((bits - one).min()))
        sums += ValueSums.of(part.astype(np.float64))
    if least < magnitude:
        ends.least = float(np.array([least + 1], dtype=integer).view(real)[0])
    return ends, sums


def share_of_rows(x: Tensor, most: int, seed: int) -> Tensor:
    """About `most` elements of a tensor: all of it, or whole rows of its last dimension, or runs
    of whole blocks where one row is longer than that. The same for every tensor of this shape."""
    length = x.shape[-1] if x.dim() else 1
    if not x.numel():
        return x.reshape(0, 1)
    table = x.reshape(-1, length)
    if x.numel() <= most:
        return table
    random = np.random.default_rng([seed, *x.shape])
    if length <= most:
        chosen = random.choice(len(table), most // length, replace=False)
        return table.index_select(0, torch.from_numpy(np.sort(chosen)))
    run = max(most // _RUNS // _UNIT * _UNIT, min(_UNIT, length))
    per_row = length // run
    chosen = random.choice(len(table) * per_row, max(most // run, 1), replace=False)
    starts = [divmod(int(place), per_row) for place in np.sort(chosen)]
    return torch.stack([table[row, i * run : (i + 1) * run] for row, i in starts])
