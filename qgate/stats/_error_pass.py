"""The one pass over two tensors: its sums, counts of differences, and worst pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch

from qgate.errors import QgateError
from qgate.records.plain_data import add_fields
from qgate.stats._axis_errors import AxisCollector
from qgate.stats._portion import ELEMENTS, Portion, Reader
from qgate.stats._sums import ErrorSums, merge_sums, push_sums
from qgate.stats.summary import Floats, Ints, distinct

SHIFT = 45  # of the 64 bits: 11 of exponent and 7 of fraction stay
KEYS = 2 ** (63 - SHIFT)
RELATIVE_ERROR = 2.0**-8


class DifferenceCounts:
    """Counts of |differences| by exponent and first 7 fraction bits.

    Values with one key differ by less than 1 part in 2^7, and the middle of them is within 1 part
    in 2^8 of each. Zero has its key to itself, except for differences below 2^-1029.
    """

    def __init__(self, keys: Ints, counts: Ints) -> None:
        self.keys, self.counts = keys, counts

    def __add__(self, other: DifferenceCounts) -> DifferenceCounts:
        keys = np.concatenate([self.keys, other.keys])
        return DifferenceCounts(*distinct(keys, np.concatenate([self.counts, other.counts])))

    def octaves(self) -> dict[int, int]:
        """Count the differences by their exponent; those of zero are left out."""
        exponents = (self.keys >> (52 - SHIFT)) - 1023
        counts: dict[int, int] = {}
        for exponent, count in zip(exponents.tolist(), self.counts.tolist(), strict=True):
            if count and exponent > -1023:
                counts[exponent] = counts.get(exponent, 0) + count
        return counts

    def percentile(self, q: float, largest: float) -> float:
        """Return the smallest value that at least q percent do not exceed, to `RELATIVE_ERROR`.

        `largest` is the exact maximum: no estimate exceeds it, and it is the answer where the rank
        is the last. NaN without values.
        """
        if not 0 <= q <= 100:
            raise QgateError(f"percentile {q} is not between 0 and 100.")
        total = int(self.counts.sum())
        if not total:
            return math.nan
        rank = max(math.ceil(Fraction(str(q)) * total / 100), 1)
        if rank == total:
            return largest
        key = self.keys[np.searchsorted(np.cumsum(self.counts), rank)]
        if not key:
            return 0.0
        middle = np.int64(key << SHIFT | 1 << (SHIFT - 1)).view(np.float64)
        return min(float(middle), largest)


class KeyTable:
    """A table that collects the counts; the system gives memory only to its used parts."""

    def __init__(self, room: int) -> None:
        self._table = np.zeros(KEYS, np.int64)
        self._counted = torch.from_numpy(self._table)
        self._ones = torch.ones(room, dtype=torch.int64, device="cpu")
        self._least, self._most = KEYS, 0

    def add(self, magnitudes: Floats, scratch: Floats, zeros: int) -> None:
        """Count all magnitudes except for so many zeros; overwrite `scratch` of that size."""
        keys = scratch.view(np.int64)
        np.right_shift(magnitudes.view(np.int64), SHIFT, out=keys)
        self._counted.scatter_add_(0, torch.from_numpy(keys), self._ones[: len(keys)])
        self._table[0] -= zeros
        self._most = max(self._most, int(keys.max()))
        keys -= 1  # of all keys, that of zero comes last
        self._least = min(self._least, int(keys.view(np.uint64).min()) + 1)

    def counts(self) -> DifferenceCounts:
        """Return the keys that occur; only the part of the table that was written is read."""
        keys = np.flatnonzero(self._table[self._least : self._most + 1]) + self._least
        if self._table[0]:
            keys = np.concatenate([[0], keys])
        return DifferenceCounts(keys, self._table[keys])


@dataclass(frozen=True)
class Element:
    """A pair that differs, or of which one side is not finite.

    `index` is its position in its tensor. `flat` counts on through a merge: in `a + b` the elements
    of b follow those of a.
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
        """The key that sorts the worst first, equals by position."""
        return -abs(self.difference), self.flat

    def located(self, shape: tuple[int, ...] | None) -> Element:
        """Return it with the index in a tensor of this shape; chunks have only the flat one."""
        index, rest = [], self.flat
        for size in reversed(shape or ()):
            rest, place = divmod(rest, size)
            index.append(place)
        return replace(self, index=(self.flat,) if shape is None else tuple(reversed(index)))

    def __str__(self) -> str:
        return f"{list(self.index)}: {self.actual:g} instead of {self.reference:g}"


@dataclass(frozen=True)
class NonFinite:
    """Counts of the values of one side that are not finite, by kind."""

    nan: int = 0
    positive_infinity: int = 0
    negative_infinity: int = 0

    @property
    def total(self) -> int:
        return self.nan + self.positive_infinity + self.negative_infinity

    def __add__(self, other: NonFinite) -> NonFinite:
        return add_fields(NonFinite, self, other)


class PairTotals:
    """Sums, counts and worst pairs of a pass over pairs."""

    def __init__(self, worst: int) -> None:
        self._worst_room = worst
        self._parts: list[tuple[int, ErrorSums]] = []
        self.elements = 0
        self.actual = self.reference = NonFinite()
        self.mismatched = 0
        self.sign_flips = 0
        self.first_non_finite: Element | None = None
        self.worst: list[Element] = []

    @property
    def sums(self) -> ErrorSums:
        return merge_sums(self._parts)

    @property
    def _least_of_the_worst(self) -> float:
        return -self.worst[-1].badness[0] if len(self.worst) == self._worst_room else 0.0

    def _keep(self, elements: list[Element]) -> None:
        """Keep the worst of these and of those before."""
        ranked = sorted([*self.worst, *elements], key=lambda element: element.badness)
        self.worst = ranked[: self._worst_room]


class ErrorPass(PairTotals):
    """The totals of one pass over readers."""

    def __init__(self, worst: int, axes: Sequence[AxisCollector]) -> None:
        super().__init__(worst)
        self._axes = axes
        self._portion = Portion()
        self._keys = KeyTable(ELEMENTS)

    def run(self, actual: Reader, reference: Reader) -> bool:
        """Read both to the end; False where one has fewer values than the other."""
        while self._portion.fill(actual, reference):
            self._add()
        return actual.elements_read == reference.elements_read

    @np.errstate(over="ignore", invalid="ignore")
    def _add(self) -> None:
        portion = self._portion
        if not portion.finite:
            self._count_non_finite()
        if self._worst_room and portion.largest_error > self._least_of_the_worst:
            self._keep_worst()
        pairs = slice(portion.count)
        bad = None if portion.bad is None else portion.bad[pairs]
        for axis in self._axes:
            axis.add(self.elements, portion.error[pairs], portion.r[pairs], bad)
        self._keys.add(portion.size, portion.scratch, portion.unpaired)
        self.sign_flips += portion.sign_flips()
        self.elements += portion.count
        push_sums(self._parts, portion.sums())

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

    def _keep_worst(self) -> None:
        """Keep the pairs that differ most; of more equals than room the first."""
        room = self._worst_room
        places = np.flatnonzero(self._portion.size > self._least_of_the_worst)
        if len(places) > room:
            sizes = self._portion.size[places]
            least = np.partition(sizes, -room)[-room]
            places = np.concatenate([places[sizes > least], places[sizes == least][:room]])
        self._keep([self._element(int(i)) for i in places])

    def _element(self, i: int) -> Element:
        return Element(self.elements + i, float(self._portion.a[i]), float(self._portion.r[i]))


def _kinds(x: Floats) -> npt.NDArray[np.int8]:
    """Return 0 where finite, 1 for NaN, 2 and 3 for the infinities."""
    kinds = np.isnan(x).astype(np.int8)
    kinds[x == math.inf] = 2
    kinds[x == -math.inf] = 3
    return kinds


def _tally(kinds: npt.NDArray[np.int8]) -> NonFinite:
    return NonFinite(*(int(np.count_nonzero(kinds == kind)) for kind in (1, 2, 3)))
