"""Exact percentiles of values that are read in portions, in few passes and little memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bits = npt.NDArray[np.int64]
_SHIFTS = (63, 47, 31, 15, 0)
"""Bits of a magnitude below its group: the whole, 32 groups per power of two, and finer ones."""
_PARTS = 1 << 16
_MOST_SORTED = 1 << 19
"""Values of one group that are sorted; a larger group is divided."""


@dataclass(eq=False)
class _Group:
    """Values with the same first bits, and the ranks (from 1) that are wanted of them.

    is_small   they are kept; those of a large group are counted by its parts
    """

    first_bits: int
    level: int
    is_small: bool
    ranks: list[int]
    bits: list[Bits] = field(default_factory=list)
    counts: Bits = field(default_factory=lambda: np.zeros(_PARTS, dtype=np.int64))

    @property
    def _width(self) -> int:
        """Bits that a part has more than the group."""
        return _SHIFTS[self.level] - _SHIFTS[self.level + 1]

    def add(self, bits: Bits) -> None:
        """Take those of these values that are in the group: keep a few, count many."""
        if self.level:
            bits = bits[bits >> _SHIFTS[self.level] == self.first_bits]
        if self.is_small:
            self.bits.append(bits)
        else:
            parts = (bits >> _SHIFTS[self.level + 1]) - (self.first_bits << self._width)
            self.counts += np.bincount(parts, minlength=_PARTS)

    def divide(self) -> list[_Group]:
        """Return those parts of a counted group that hold a rank."""
        ends = np.cumsum(self.counts)
        ranks_of: dict[int, list[int]] = {}
        for rank, part in zip(self.ranks, np.searchsorted(ends, self.ranks), strict=True):
            before = int(ends[part] - self.counts[part])
            ranks_of.setdefault(int(part), []).append(rank - before)
        start = self.first_bits << self._width
        return [
            _Group(start + part, self.level + 1, bool(self.counts[part] <= _MOST_SORTED), ranks)
            for part, ranks in ranks_of.items()
        ]

    def values(self) -> Bits:
        """Return the bits of the values at the ranks."""
        if not _SHIFTS[self.level]:  # all are equal
            return np.full(len(self.ranks), self.first_bits, dtype=np.int64)
        values: Bits = np.sort(np.concatenate(self.bits))[np.array(self.ranks) - 1]
        return values


def exact_percentiles(
    portions: Callable[[], Iterable[Array]], percents: Sequence[int]
) -> list[float]:
    """Return the smallest magnitudes that so many percent do not exceed; NaN without values.

    `portions` starts a pass over all values, which are finite, and `percents` are in order. Each
    pass divides the groups of values that hold a percentile until these are small or all equal.
    """
    whole = _Group(0, 0, False, [])
    _read(portions(), [whole])
    total = int(whole.counts.sum())
    if not total:
        return [math.nan] * len(percents)
    whole.ranks = [max(-(-percent * total // 100), 1) for percent in percents]
    large, closed = [whole], list[_Group]()
    while large:
        parts = [part for group in large for part in group.divide()]
        groups = [part for part in parts if _SHIFTS[part.level]]
        if groups:
            _read(portions(), groups)
        large = [group for group in groups if not group.is_small]
        closed += [part for part in parts if part not in large]
    values = np.sort(np.concatenate([group.values() for group in closed]))
    return [float(value) for value in values.view(np.float64)]


def _read(portions: Iterable[Array], groups: Sequence[_Group]) -> None:
    """Pass over all values, and give each group its own."""
    for part in portions:
        bits = np.ascontiguousarray(np.abs(part), dtype=np.float64).reshape(-1).view(np.int64)
        for group in groups:
            group.add(bits)
