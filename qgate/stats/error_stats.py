"""The errors of a tensor against its reference, from one pass, and mergeable."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from torch import Tensor

from qgate.errors import QgateError
from qgate.stats._axis_errors import AxisCollector, AxisErrors
from qgate.stats._difference_counts import RELATIVE_ERROR, DifferenceCounts
from qgate.stats._error_pass import ErrorPass, NonFinite, Pair
from qgate.stats._reading import Reader, require_floats
from qgate.stats._sums import ErrorSums
from qgate.stats.metrics import METRICS

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Element:
    """One place where two tensors differ, or where one is not finite.

    `index` is its place in the tensor it came from. `flat` counts on through a merge: in `a + b`
    the elements of b follow those of a.
    """

    flat: int
    index: tuple[int, ...]
    actual: float
    reference: float

    @property
    def difference(self) -> float:
        return self.actual - self.reference

    def __str__(self) -> str:
        return f"{list(self.index)}: {self.actual:g} instead of {self.reference:g}"


@dataclass(frozen=True, eq=False)
class ErrorStats:
    """What `errors` found; `a + b` is what it finds in both together.

    Counts, maxima, percentiles and `sums` do not depend on which side of the + comes first, not in
    the last bit. Sums merged in another grouping agree to about 1e-15 of the sums of magnitudes.
    """

    elements: int
    """Pairs, finite or not."""
    sums: ErrorSums
    """Over the pairs that are finite on both sides."""
    actual_non_finite: NonFinite
    reference_non_finite: NonFinite
    mismatched: int
    """Places where one side has a NaN or an infinity and the other has not the same."""
    sign_flips: int
    """Pairs of which neither is zero and one is negative."""
    differences: DifferenceCounts
    worst: tuple[Element, ...]
    """The finite pairs that differ most, the worst first and equals by `flat`."""
    worst_room: int
    first_non_finite: Element | None
    channels: AxisErrors | None = None
    tokens: AxisErrors | None = None

    percentile_error: ClassVar[float] = RELATIVE_ERROR
    """The largest relative error of a percentile: it is read from counts in bins 2^-7 wide."""

    @property
    def finite(self) -> bool:
        """Whether no NaN and no infinity was seen on either side."""
        return self.elements == self.sums.count

    def metric(self, name: str, *, finite_only: bool = False) -> float:
        """One of `metrics.METRICS`; NaN, which passes no limit, if a value was not finite.

        Infinities that meet at one place are no agreement either: nothing bounds their error.
        `finite_only` leaves out the pairs that are not finite.
        """
        metric = METRICS.get(name)
        return metric.function(self.sums) if self.finite or finite_only else math.nan

    def metrics(self, *, finite_only: bool = False) -> dict[str, float]:
        return {each.name: self.metric(each.name, finite_only=finite_only) for each in METRICS}

    def percentile(self, q: float, *, finite_only: bool = False) -> float:
        """Of |actual - reference|, with a relative error of at most `percentile_error`.

        It is the smallest difference that at least q percent of the pairs do not exceed (numpy's
        "inverted_cdf"); 0 and the maximum are exact. NaN as for `metric`.
        """
        found = self.differences.percentile(q, METRICS.get("max_abs").function(self.sums))
        return found if self.finite or finite_only else math.nan

    @property
    def p50(self) -> float:
        return self.percentile(50)

    @property
    def p90(self) -> float:
        return self.percentile(90)

    @property
    def p95(self) -> float:
        return self.percentile(95)

    @property
    def p99(self) -> float:
        return self.percentile(99)

    def __add__(self, other: ErrorStats) -> ErrorStats:
        if not isinstance(other, ErrorStats):
            return NotImplemented
        room = min(self.worst_room, other.worst_room)
        moved = [replace(each, flat=each.flat + self.elements) for each in other.worst]
        worst = sorted([*self.worst, *moved], key=lambda each: _badness(each))[:room]
        first = self.first_non_finite
        if first is None and other.first_non_finite is not None:
            later = other.first_non_finite
            first = replace(later, flat=later.flat + self.elements)
        return ErrorStats(
            self.elements + other.elements,
            self.sums + other.sums,
            self.actual_non_finite + other.actual_non_finite,
            self.reference_non_finite + other.reference_non_finite,
            self.mismatched + other.mismatched,
            self.sign_flips + other.sign_flips,
            self.differences + other.differences,
            tuple(worst),
            room,
            first,
            _merged("channel_axis", self.channels, other.channels),
            _merged("token_axis", self.tokens, other.tokens),
        )
