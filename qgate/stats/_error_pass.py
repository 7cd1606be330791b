"""The one pass over two tensors: what it collects beside the sums, and how it merges those."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from qgate.stats._axis_errors import AxisCollector
from qgate.stats._difference_counts import DifferenceCounts, KeyTable
from qgate.stats._portion import ELEMENTS, Portion
from qgate.stats._reading import Reader
from qgate.stats._sums import ErrorSums, Floats, merged_sums, pushed


@dataclass(frozen=True)
class Element:
    """One place where two tensors differ, or where one is not finite.

    `index` is its place in the tensor it came from. `flat` counts on through a merge: in `a + b`
    the elements of b follow those of a.
    """

    flat: int
    actual: float
    reference: float
    index: tuple[int, ...] = ()

    @property
    def difference(self) -> float:
        return self.actual - self.reference

    @property
    def badness(self) -> tuple[float, int]:
        """Sorts the worst first, equals by place."""
        return -abs(self.difference), self.flat

    def located(self, shape: tuple[int, ...] | None) -> Element:
        """With the index in a tensor of this shape; chunks have only the flat one."""
        index = (self.flat,) if shape is None else np.unravel_index(self.flat, shape)
        return replace(self, index=tuple(int(i) for i in index))

    def __str__(self) -> str:
        return f"{list(self.index)}: {self.actual:g} instead of {self.reference:g}"


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
        self.first_non_finite: Element | None = None
        self.worst: list[Element] = []

    def run(self, actual: Reader, reference: Reader) -> bool:
        """Read both to the end; False where one has fewer values than the other."""
        while self._portion.fill(actual, reference):
            self._add()
        return actual.taken == reference.taken

    @np.errstate(over="ignore", invalid="ignore")
    def _add(self) -> None:
        portion = self._portion
        if not portion.finite:
            self._count_non_finite()
        if self._room and portion.largest_error > self._least_of_the_worst:
            self._keep_worst()
        pairs = slice(portion.count)
        bad = None if portion.bad is None else portion.bad[pairs]
        for axis in self._axes:
            axis.add(self.elements, portion.error[pairs], portion.r[pairs], bad)
        self._keys.add(portion.size, portion.spare, portion.holes)
        self.sign_flips += portion.sign_flips()
        self.elements += portion.count
        pushed(self._parts, portion.sums())

    @property
    def sums(self) -> ErrorSums:
        return merged_sums(self._parts)

    @property
    def differences(self) -> DifferenceCounts:
        return self._keys.counts()

    def _count_non_finite(self) -> None:
        portion = self._portion
        kinds_a, kinds_r = _kinds(portion.a), _kinds(portion.r)
        bad = (kinds_a != 0) | (kinds_r != 0)
        if self.first_non_finite is None and bad.any():
            self.first_non_finite = self._element(int(np.argmax(bad)))
        self.actual = self.actual + _tally(kinds_a)
        self.reference = self.reference + _tally(kinds_r)
        self.mismatched += int(np.count_nonzero(kinds_a != kinds_r))
        portion.set_aside(bad)

    @property
    def _least_of_the_worst(self) -> float:
        return -self.worst[-1].badness[0] if len(self.worst) == self._room else 0.0

    def _keep_worst(self) -> None:
        """Only differences count; where there are more equals than room, the first of them."""
        room = self._room
        places = np.flatnonzero(self._portion.size > self._least_of_the_worst)
        if len(places) > room:
            sizes = self._portion.size[places]
            least = np.partition(sizes, -room)[-room]
            places = np.concatenate([places[sizes > least], places[sizes == least][:room]])
        found = [self._element(int(i)) for i in places]
        self.worst = sorted([*self.worst, *found], key=lambda each: each.badness)[:room]

    def _element(self, i: int) -> Element:
        return Element(self.elements + i, float(self._portion.a[i]), float(self._portion.r[i]))


def _kinds(x: Floats) -> npt.NDArray[np.int8]:
    """0 finite, 1 NaN, 2 and 3 the infinities."""
    kinds = np.isnan(x).astype(np.int8)
    kinds[x == math.inf] = 2
    kinds[x == -math.inf] = 3
    return kinds


def _tally(kinds: npt.NDArray[np.int8]) -> NonFinite:
    return NonFinite(*(int(np.count_nonzero(kinds == kind)) for kind in (1, 2, 3)))
