"""Errors for each index of one axis: per channel, per token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qgate.errors import QgateError
from qgate.stats.summary import Floats, Ints


@dataclass(frozen=True, eq=False)
class AxisErrors:
    """Arrays with one entry per index of an axis; `a + b` adds them index by index.

    An index with a NaN or an infinity on either side has NaN for its metrics; `finite_only()`
    omits such pairs instead. Squares are plain float64: where they leave its range (values beyond
    1e±150), metrics that need them are inf or NaN.
    """

    axis: int
    count: Ints
    non_finite: Ints
    sum_square_error: Floats = field(repr=False)
    sum_abs_error: Floats = field(repr=False)
    sum_square_reference: Floats = field(repr=False)
    max_abs_error: Floats = field(repr=False)

    def __len__(self) -> int:
        return len(self.count)

    def finite_only(self) -> AxisErrors:
        return replace(self, non_finite=np.zeros_like(self.non_finite))

    @property
    def mse(self) -> Floats:
        return self._nan_where_undefined(_quotient(self._squares, self.count))

    @property
    def mae(self) -> Floats:
        return self._nan_where_undefined(_quotient(self.sum_abs_error, self.count))

    @property
    def max_abs(self) -> Floats:
        return self._nan_where_undefined(self.max_abs_error)

    @property
    def relative_mse(self) -> Floats:
        """0 without error, inf where only the reference is zero."""
        ratios = _quotient(self._squares, self.sum_square_reference)
        return self._nan_where_undefined(np.where(self.max_abs_error == 0, 0.0, ratios))

    @property
    def sqnr_db(self) -> Floats:
        """inf without error, -inf where only the reference is zero."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = 10 * (np.log10(self.sum_square_reference) - np.log10(self._squares))
        return self._nan_where_undefined(np.where(self.max_abs_error == 0, math.inf, ratios))

    @property
    def _squares(self) -> Floats:
        lost = (self.sum_square_error == 0) & (self.max_abs_error > 0)
        return np.where(lost, math.nan, self.sum_square_error)

    def _nan_where_undefined(self, values: Floats) -> Floats:
        return np.where((self.count == 0) | (self.non_finite > 0), math.nan, values)

    def __add__(self, other: AxisErrors) -> AxisErrors:
        if len(self) != len(other):
            raise QgateError(
                f"an axis of {len(self)} and one of {len(other)} do not merge: errors per index "
                "add up over parts that agree in that axis."
            )
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        largest = np.maximum(self.max_abs_error, other.max_abs_error)
        return AxisErrors(self.axis, max_abs_error=largest, **sums)

    def to_dict(self) -> dict[str, object]:
        """The arrays as lists."""
        names = ("count", "non_finite", "mse", "mae", "sqnr_db", "relative_mse", "max_abs")
        return {"axis": self.axis} | {name: getattr(self, name).tolist() for name in names}


def _quotient(part: Floats, whole: Floats | Ints) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(part / whole)


_SUMS = ("count", "non_finite", "sum_square_error", "sum_abs_error", "sum_square_reference")


class AxisCollector:
    """Sums per index of an axis, of a tensor that arrives as flat runs in order."""

    def __init__(self, shape: tuple[int, ...], axis: int) -> None:
        if not -len(shape) <= axis < len(shape):
            raise QgateError(f"axis {axis} does not exist in a tensor of shape {shape}.")
        self._axis = axis % len(shape)
        self._size = shape[self._axis]
        self._inner = math.prod(shape[self._axis + 1 :])
        self._elements = math.prod(shape)
        self._non_finite = np.zeros(self._size, np.int64)
        self._sums = np.zeros((3, self._size))
        self._largest = np.zeros(self._size)

    def add(
        self, start: int, error: Floats, reference: Floats, bad: npt.NDArray[np.bool_] | None
    ) -> None:
        """Add values from flat index `start` on; bad ones count as no error, value 0."""
        self._fold(np.add, self._sums[0], start, error * error)
        magnitude = np.abs(error)
        self._fold(np.add, self._sums[1], start, magnitude)
        self._fold(np.maximum, self._largest, start, magnitude)
        self._fold(np.add, self._sums[2], start, reference * reference)
        if bad is not None:
            self._fold(np.add, self._non_finite, start, bad.astype(np.int64))

    def _fold(
        self, ufunc: np.ufunc, total: npt.NDArray[Any], start: int, x: npt.NDArray[Any]
    ) -> None:
        first, skipped = divmod(start, self._inner)
        if self._inner > 1:
            ends = np.arange(self._inner - skipped, len(x), self._inner)
            x = ufunc.reduceat(x, np.concatenate([[0], ends]))
        index = first % self._size
        head = min((self._size - index) % self._size, len(x))
        rounds = (len(x) - head) // self._size
        tail = head + rounds * self._size
        whole = ufunc.reduce(x[head:tail].reshape(rounds, self._size), axis=0, initial=0)
        for target, part in (
            (slice(index, index + head), x[:head]),
            (slice(None), whole),
            (slice(0, len(x) - tail), x[tail:]),
        ):
            ufunc(total[target], part, out=total[target])

    def result(self) -> AxisErrors:
        per_index = self._elements // self._size if self._size else 0
        count = per_index - self._non_finite
        squares, magnitudes, references = self._sums
        return AxisErrors(
            self._axis, count, self._non_finite, squares, magnitudes, references, self._largest
        )
