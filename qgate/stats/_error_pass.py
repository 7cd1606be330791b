"""The one pass over two tensors: what it collects beside the sums, and how it merges those."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qgate.stats._axis_errors import AxisCollector
from qgate.stats._difference_counts import DifferenceCounts, KeyTable
from qgate.stats._portion import ELEMENTS, Portion
from qgate.stats._reading import Reader
from qgate.stats._sums import ErrorSums, Floats


@dataclass(frozen=True)
class Pair:
    """One element: its index in flat order, and both values."""

    flat: int
    actual: float
    reference: float

    @property
    def badness(self) -> tuple[float, int]:
        """Sorts the worst first, equals by index."""
        return -abs(self.actual - self.reference), self.flat


@dataclass(frozen=True)
class NonFinite:
    """How many values of one side are not finite, by kind."""

    nan: int = 0
    positive_infinity: int = 0
    negative_infinity: int = 0

    @property
    def total(self) -> int:
        return self.nan + self.positive_infinity + self.negative_infinity

    def __add__(self, other: NonFinite) -> NonFinite:
        return NonFinite(
            self.nan + other.nan,
            self.positive_infinity + other.positive_infinity,
            self.negative_infinity + other.negative_infinity,
        )


class ErrorPass:
    """Runs once; then its attributes are what was found."""

    def __init__(self, worst: int, axes: Sequence[AxisCollector]) -> None:
        self._room = worst
        self._axes = axes
        self._portion = Portion()
        self._keys = KeyTable(ELEMENTS)
        self._parts: list[tuple[int, ErrorSums]] = []
        self.elements = 0
        self.actual = self.reference = NonFinite()
        self.mismatched = 0
        self.sign_flips = 0
        self.first_non_finite: Pair | None = None
        self.worst: list[Pair] = []

    def run(self, actual: Reader, reference: Reader) -> None:
        """Read both to the end, or to the portion where one has fewer values."""
        portion = self._portion
        with np.errstate(over="ignore", invalid="ignore"):
            while portion.fill(actual, reference):
                if not portion.finite:
                    self._count_non_finite()
                if self._room and portion.largest_error > self._least_of_the_worst:
                    self._keep_worst()
                bad = None if portion.bad is None else portion.bad[: portion.count]
                for axis in self._axes:
                    values = (each[: portion.count] for each in (portion.error, portion.r))
                    axis.add(self.elements, *values, bad)
                self._keys.add(portion.size, portion.spare, portion.holes)
                self.sign_flips += portion.sign_flips()
                self.elements += portion.count
                self._push(portion.sums())

    @property
    def sums(self) -> ErrorSums:
        total = ErrorSums()
        for _, part in reversed(self._parts):
            total = total + part
        return total

    @property
    def differences(self) -> DifferenceCounts:
        return self._keys.counts()

    def _push(self, part: ErrorSums) -> None:
        """Merge parts of one size, as a binary counter carries: rounding grows with the logarithm
        of their number."""
        level = 0
        while self._parts and self._parts[-1][0] == level:
            part = self._parts.pop()[1] + part
            level += 1
        self._parts.append((level, part))

    def _count_non_finite(self) -> None:
        portion = self._portion
        kinds_a, kinds_r = _kinds(portion.a), _kinds(portion.r)
        bad = (kinds_a != 0) | (kinds_r != 0)
        if self.first_non_finite is None and bad.any():
            self.first_non_finite = self._pair(int(np.argmax(bad)))
        self.actual = self.actual + _tally(kinds_a)
        self.reference = self.reference + _tally(kinds_r)
        self.mismatched += int(np.count_nonzero(kinds_a != kinds_r))
        portion.set_aside(bad)

    @property
    def _least_of_the_worst(self) -> float:
        return -self.worst[-1].badness[0] if len(self.worst) == self._room else 0.0

    def _keep_worst(self) -> None:
        """Only differences count; where there are more equals than room, the first of them."""
        size, room = self._portion.size, self._room
        bound = self._least_of_the_worst
        if len(size) > room:
            bound = max(bound, float(np.partition(size, len(size) - room)[len(size) - room]))
        above = np.flatnonzero(size > bound)
        equal = np.flatnonzero(size == bound)[:room] if bound else above[:0]
        found = [self._pair(int(i)) for i in (*above, *equal)]
        self.worst = sorted([*self.worst, *found], key=lambda pair: pair.badness)[:room]

    def _pair(self, i: int) -> Pair:
        return Pair(self.elements + i, float(self._portion.a[i]), float(self._portion.r[i]))


def _kinds(x: Floats) -> npt.NDArray[np.int8]:
    """0 finite, 1 NaN, 2 and 3 the infinities."""
    kinds = np.isnan(x).astype(np.int8)
    kinds[x == math.inf] = 2
    kinds[x == -math.inf] = 3
    return kinds


def _tally(kinds: npt.NDArray[np.int8]) -> NonFinite:
    return NonFinite(*(int(np.count_nonzero(kinds == kind)) for kind in (1, 2, 3)))
