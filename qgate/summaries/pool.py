"""A pool of tensors: what they have in common, in a few kilobytes that add up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np
import torch

from qgate.errors import QgateError
from qgate.stats import Counts, massive_beyond
from qgate.stats.bits import BY_NAME
from qgate.stats.moments import PowerSums
from qgate.stats.summary import Floats, Ints, quantiles_of
from qgate.summaries.outcomes import OutcomeSums
from qgate.summaries.record import Binades, Usage, ValueSummary

# Patterns that wait to be put together with others of their group, and pools that do.
_AT_ONCE, _MOST_WAITING = 1 << 17, 64
_SOURCES = ("values", "counts", "statistics")
_NAN = {"bfloat16": 0x7FC0, "float16": 0x7E00}
_PROBABILITIES = ("0", "0.001", "0.01", "0.05", "0.25", "0.5", "0.75", "0.95", "0.99", "0.999", "1")


@dataclass(frozen=True, eq=False)
class Pool:
    """A pool of tensors counted in one dtype; `a + b` pools both, and integers add up exactly.

    counts             of the bit patterns among the counted elements
    nan, posinf, neginf, low, high, least   exact, of all elements: non-finite ones by kind, finite
                       ends, smallest magnitude that is not zero; NaN where there is none
    vanished           counted as zero, but not zero before they were rounded to be counted
    moments            of values that were rounded to be counted; None where the counts have them
    outcomes              by format
    """

    tensors: int
    elements: int
    source: str
    counts: Counts
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    low: float = math.nan
    high: float = math.nan
    least: float = math.nan
    vanished: int = 0
    moments: PowerSums | None = field(default=None, repr=False)
    outcomes: Mapping[str, OutcomeSums] = field(default_factory=dict, repr=False)

    def __add__(self, other: Pool) -> Pool:
        return Pool.together((self, other)) if isinstance(other, Pool) else NotImplemented

    @staticmethod
    def together(pools: Sequence[Pool]) -> Pool:
        """Pool them all, with the bits of adding them one by one."""
        first = pools[0]
        outcomes: dict[str, OutcomeSums] = {}
        for pool in pools:
            if first.counted_as != pool.counted_as:
                names = [p.counted_as or "nothing" for p in (first, pool)]
                raise QgateError(
                    f"tensors counted as {names[0]} and as {names[1]} make no common pool: "
                    "pool those of one counted dtype."
                )
            for name, sums in pool.outcomes.items():
                outcomes[name] = outcomes[name] + sums if name in outcomes else sums
        sums_of = {
            name: sum(getattr(pool, name) for pool in pools)
            for name in ("tensors", "elements", "nan", "posinf", "neginf", "vanished")
        }
        moments = None
        if any(pool.moments is not None for pool in pools):
            moments = PowerSums(2)
            for pool in pools:
                moments.merge(pool.counts.moments if pool.moments is None else pool.moments)
        return Pool(
            source=max((pool.source for pool in pools), key=_SOURCES.index),
            counts=Counts.together(pool.counts for pool in pools),
            low=float(np.fmin.reduce([pool.low for pool in pools])),
            high=float(np.fmax.reduce([pool.high for pool in pools])),
            least=float(np.fmin.reduce([pool.least for pool in pools])),
            moments=moments,
            outcomes=outcomes,
            **sums_of,
        )

    @property
    def counted_as(self) -> str:
        return self.counts.dtype

    @property
    def amax(self) -> float:
        """The largest finite magnitude; NaN if there is none."""
        return max(abs(self.low), abs(self.high))

    @property
    def weighted(self) -> tuple[Floats, Ints]:
        """Distinct finite values among the counted, ascending, and how often each occurs."""
        return self.counts.weighted()

    @cached_property
    def massive(self) -> float:
        """The magnitude above which elements are massive, of those that were counted."""
        return massive_beyond(self.counts)

    @property
    def zeros(self) -> int:
        """Counted values that were exactly zero before any rounding."""
        return self.counts.zeros - self.vanished

    def summary(self) -> ValueSummary:
        """Return plain data without figures that do not exist or are not finite."""
        values, weights = self.weighted
        counted = self.counts.n
        summary: dict[str, object] = {
            "tensors": self.tensors,
            "elements": self.elements,
            "counted": counted,
            "source": self.source,
            "counted_as": self.counted_as,
            "nan": self.nan,
            "posinf": self.posinf,
            "neginf": self.neginf,
        }
        numbers = {"min": self.low, "max": self.high, "amax": self.amax, "amin": self.least}
        numbers |= self.counts.moments.figures()
        if self.moments is not None:
            numbers |= self.moments.figures()
        if self.low == self.high:
            numbers |= {"std": 0.0, "skew": math.nan, "kurtosis": math.nan}
        if counted:
            summary["zeros"] = self.zeros
        if len(values):
            at = quantiles_of(values, weights, [float(p) for p in _PROBABILITIES])
            at = at.clip(self.low, self.high)
            at[[0, -1]] = self.low, self.high
            summary["quantiles"] = dict(zip(_PROBABILITIES, at.tolist(), strict=True))
        if octaves := self.counts.log2_histogram():
            first, last = min(octaves), max(octaves)
            filled = [octaves.get(exponent, 0) for exponent in range(first, last + 1)]
            summary["binades"] = Binades(first=first, counts=filled)
        if counted and self.counted_as == "bfloat16":
            summary["usage"] = _usage(*self.counts.occurring)
        if self.outcomes:
            summary["formats"] = {name: sums.outcome() for name, sums in self.outcomes.items()}
        summary |= {name: value for name, value in numbers.items() if math.isfinite(value)}
        return cast(ValueSummary, summary)


def _usage(patterns: np.ndarray, counts: Ints) -> Usage:
    """Describe which bf16 patterns occur."""
    fields = np.zeros(256, dtype=np.int64)
    np.add.at(fields, (patterns >> 7) & 0xFF, counts)
    share = fields[fields > 0] / max(int(counts.sum()), 1)
    bits = -float(share @ np.log2(share)) if len(share) > 1 else 0.0
    return Usage(exponents=len(share), patterns=len(patterns), exponent_bits=bits)


class Pooling:
    """Pools that are put together some at a time, which costs little more than one of them."""

    def __init__(self) -> None:
        self._waiting: list[Pool] = []
        self._patterns = 0

    def add(self, pool: Pool) -> None:
        self._waiting.append(pool)
        self._patterns += len(pool.counts.occurring[0])
        if self._patterns > _AT_ONCE or len(self._waiting) > _MOST_WAITING:
            self._waiting, self._patterns = [self.pool], 0

    @property
    def pool(self) -> Pool:
        return Pool.together(self._waiting)


def of_counts(counts: Counts) -> Pool:
    """Return the pool of one tensor, with its ends from the counts, of 16-bit patterns."""
    dense = counts.counts
    name, nan, elements = counts.dtype, counts.nan, counts.n
    if len(dense) == 256:
        every = torch.arange(256, dtype=torch.uint8).view(BY_NAME[name]).to(torch.bfloat16)
        name, narrow, dense = "bfloat16", dense, np.zeros(2**16, dtype=np.int64)
        np.add.at(dense, every.view(torch.int16).numpy().view(np.uint16), narrow)
        counts = Counts(name, dense)
    if nan:
        # How a NaN is written is up to the code that rounds; here there is one.
        patterns, values = counts.occurring[0], counts.values
        dense[patterns[np.isnan(values)]] = 0
        dense[_NAN[name]] = nan
        counts = Counts(name, dense)
    pool = Pool(1, elements, "values", counts, nan, counts.posinf, counts.neginf)
    return replace(pool, low=counts.min, high=counts.max, least=counts.amin)
