"""A pool of tensors: what they have in common, in a few kilobytes that add up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from qgate.errors import QgateError
from qgate.stats import Counts, massive_beyond
from qgate.stats.bits import BY_NAME
from qgate.summaries.ends import ValueSums
from qgate.summaries.figures import (
    PROBABILITIES,
    binades_of,
    moments_of,
    quantiles_of,
    usage_of,
)
from qgate.summaries.outcomes import FateSums, Floats, Ints, value_table
from qgate.summaries.record import Portrait

# Patterns that wait to be put together with others of their group, and pools that do.
_AT_ONCE, _MOST_WAITING = 1 << 17, 64
_SOURCES = ("values", "counts", "statistics")
_NAN = {"bfloat16": 0x7FC0, "float16": 0x7E00}
Patterns = npt.NDArray[np.uint16]


@dataclass(frozen=True, eq=False)
class Pool:
    """Tensors counted in one dtype. `a + b` is the pool of both; integers add up exactly.

    patterns, counts   bit patterns that occur among the counted elements, and how often
    nan, posinf, neginf, low, high, least   exact, of all elements: non-finite ones by kind, finite
                       ends, smallest magnitude that is not zero; NaN where there is none
    vanished           counted as zero, but not zero before they were rounded to be counted
    sums               of values that were rounded to be counted; None where the counts have them
    fates              by format
    """

    tensors: int
    elements: int
    counted_as: str
    source: str
    patterns: Patterns = field(repr=False)
    counts: Ints = field(repr=False)
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    low: float = math.nan
    high: float = math.nan
    least: float = math.nan
    vanished: int = 0
    sums: ValueSums | None = None
    fates: Mapping[str, FateSums] = field(default_factory=dict, repr=False)

    def __add__(self, other: Pool) -> Pool:
        return Pool.together((self, other)) if isinstance(other, Pool) else NotImplemented

    @staticmethod
    def together(pools: Sequence[Pool]) -> Pool:
        """The pool of all, with the bits of adding them one by one."""
        first = pools[0]
        for other in pools:
            if first.counted_as != other.counted_as:
                names = [p.counted_as or "nothing" for p in (first, other)]
                raise QgateError(
                    f"tensors counted as {names[0]} and as {names[1]} make no common pool: "
                    "pool those of one counted dtype."
                )
        dense = np.zeros(2**16, dtype=np.int64)
        fates: dict[str, FateSums] = {}
        for pool in pools:
            dense[pool.patterns] += pool.counts
            for name, sums in pool.fates.items():
                fates[name] = fates[name] + sums if name in fates else sums
        there = np.flatnonzero(dense)
        return Pool(
            sum(pool.tensors for pool in pools),
            sum(pool.elements for pool in pools),
            first.counted_as,
            max((pool.source for pool in pools), key=_SOURCES.index),
            there.astype(np.uint16),
            dense[there],
            sum(pool.nan for pool in pools),
            sum(pool.posinf for pool in pools),
            sum(pool.neginf for pool in pools),
            float(np.fmin.reduce([pool.low for pool in pools])),
            float(np.fmax.reduce([pool.high for pool in pools])),
            float(np.fmin.reduce([pool.least for pool in pools])),
            sum(pool.vanished for pool in pools),
            _sums_of(pools),
            fates,
        )

    def _own_sums(self) -> ValueSums:
        if self.sums is not None:
            return self.sums
        values, weights = self.weighted
        return ValueSums.of(values, weights.astype(np.float64))

    @cached_property
    def massive(self) -> float:
        """The magnitude above which elements are massive, of those that were counted."""
        return massive_beyond(self.value_counts())

    @cached_property
    def counted(self) -> int:
        return int(self.counts.sum())

    @property
    def amax(self) -> float:
        """The largest finite magnitude; NaN if there is none."""
        return max(abs(self.low), abs(self.high))

    @cached_property
    def weighted(self) -> tuple[Floats, Ints]:
        """Distinct finite values among the counted, ascending, and how often each occurs."""
        if not len(self.patterns):
            return np.empty(0), np.empty(0, dtype=np.int64)
        values = value_table(self.counted_as)[self.patterns] + 0.0
        order = np.argsort(values, kind="stable")
        order = order[np.isfinite(values[order])]
        values, weights = values[order], self.counts[order]
        zeros = np.flatnonzero(values == 0)
        if len(zeros) == 2:
            weights[zeros[0]] += weights[zeros[1]]
            values, weights = np.delete(values, zeros[1]), np.delete(weights, zeros[1])
        return values, weights

    @property
    def zeros(self) -> int:
        """Among the counted; exactly zero before any rounding."""
        values, weights = self.weighted
        return int(weights[values == 0].sum()) - self.vanished

    def value_counts(self) -> Counts:
        """The same counts with a place for every pattern."""
        dense = np.zeros(2**16, dtype=np.int64)
        dense[self.patterns] = self.counts
        return Counts(self.counted_as, dense)

    def portrait(self) -> Portrait:
        """Plain data; what does not exist or is not finite is left out."""
        values, weights = self.weighted
        found: dict[str, Any] = {
            "tensors": self.tensors,
            "elements": self.elements,
            "counted": self.counted,
            "source": self.source,
            "counted_as": self.counted_as,
            "nan": self.nan,
            "posinf": self.posinf,
            "neginf": self.neginf,
        }
        numbers: dict[str, float] = {
            "min": self.low,
            "max": self.high,
            "amax": self.amax,
            "amin": self.least,
            **moments_of(values, weights),
        }
        if self.sums is not None:
            numbers |= self.sums.moments()
        if self.low == self.high:
            numbers = {k: v for k, v in numbers.items() if k not in ("skew", "kurtosis")} | {
                "std": 0.0
            }
        if self.counted:
            found["zeros"] = self.zeros
        if len(values):
            places = np.array([float(p) for p in PROBABILITIES])
            at = quantiles_of(values, weights, places).clip(self.low, self.high)
            at[[0, -1]] = self.low, self.high
            found["quantiles"] = dict(zip(PROBABILITIES, at.tolist(), strict=True))
        if (binades := binades_of(values, weights)) is not None:
            found["binades"] = binades
        if self.counted and self.counted_as == "bfloat16":
            found["usage"] = usage_of(self.patterns, self.counts)
        if self.fates:
            found["formats"] = {name: sums.fate() for name, sums in self.fates.items()}
        found |= {name: value for name, value in numbers.items() if math.isfinite(value)}
        return cast(Portrait, found)


def _sums_of(pools: Sequence[Pool]) -> ValueSums | None:
    """None where the counts have them; what comes before the first that has its own is counted."""
    at = next((place for place, pool in enumerate(pools) if pool.sums is not None), None)
    if at is None:
        return None
    found = Pool.together(pools[:at])._own_sums() if at else None
    for pool in pools[at:]:
        found = pool._own_sums() if found is None else found + pool._own_sums()
    return found


class Pooling:
    """Pools that are put together some at a time, which costs little more than one of them."""

    def __init__(self) -> None:
        self._waiting: list[Pool] = []
        self._patterns = 0

    def add(self, pool: Pool) -> None:
        self._waiting.append(pool)
        self._patterns += len(pool.patterns)
        if self._patterns > _AT_ONCE or len(self._waiting) > _MOST_WAITING:
            self._waiting, self._patterns = [self.pool], 0

    @property
    def pool(self) -> Pool:
        return Pool.together(self._waiting)


def of_counts(counted_as: str, dense: Ints) -> Pool:
    """A pool of one tensor with its ends as the counts have them."""
    if len(dense) < 2**16:
        counted_as, dense = "bfloat16", _as_bf16(counted_as, dense)
    table = value_table(counted_as)
    nan = int(dense[np.isnan(table)].sum())
    if nan:
        # How a NaN is written is up to the code that rounds; here there is one.
        dense = np.where(np.isnan(table), 0, dense)
        dense[_NAN[counted_as]] = nan
    there = np.flatnonzero(dense)
    patterns, found = there.astype(np.uint16), dense[there]
    pool = Pool(1, int(found.sum()), counted_as, "values", patterns, found)
    values, table = pool.weighted[0], table[patterns]
    sizes = np.abs(values[values != 0])
    return replace(
        pool,
        nan=nan,
        posinf=int(found[table == math.inf].sum()),
        neginf=int(found[table == -math.inf].sum()),
        low=float(values[0]) if len(values) else math.nan,
        high=float(values[-1]) if len(values) else math.nan,
        least=float(sizes.min()) if len(sizes) else math.nan,
    )


def _as_bf16(counted_as: str, dense: Ints) -> Ints:
    values = torch.arange(256, dtype=torch.uint8).view(BY_NAME[counted_as]).to(torch.bfloat16)
    wide = np.zeros(2**16, dtype=np.int64)
    np.add.at(wide, values.view(torch.int16).numpy().view(np.uint16), dense)
    return wide
