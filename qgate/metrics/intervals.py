"""Intervals of means, of ratios and of groups whose values are alike, and what they can tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % of Student's t by degrees of freedom; beyond the table, of the normal.
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 14: 2.14, 19: 2.09, 29: 2.05}  # fmt: skip  # noqa: E501
# One-sided 80 % of it, for the power of a test.
_T80 = {1: 1.376, 2: 1.061, 3: 0.978, 4: 0.941, 5: 0.920, 6: 0.906, 7: 0.896, 8: 0.889, 9: 0.883, 14: 0.868, 19: 0.861, 29: 0.854}  # fmt: skip  # noqa: E501
_NORMAL95, _NORMAL80 = 1.96, 0.842
_TABLE_ENDS = 29


@dataclass(frozen=True)
class GroupedMean:
    """A mean over groups with its standard error, which is infinite for one group."""

    mean: float
    standard_error: float
    groups: int

    @property
    def half_interval(self) -> float:
        """Return half of the 95 % interval."""
        return self._quantile(_T95, _NORMAL95) * self.standard_error

    @property
    def detectable(self) -> float:
        """Return the smallest true mean that a test at 5 % tells from 0 in 80 % of runs."""
        return self.half_interval + self._quantile(_T80, _NORMAL80) * self.standard_error

    def _quantile(self, table: dict[int, float], normal: float) -> float:
        degrees = self.groups - 1
        if degrees > _TABLE_ENDS:
            return normal
        return table[max((entry for entry in table if entry <= degrees), default=1)]


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values and half of its 95 % interval, infinite for a single one."""
    return grouped_interval(values, [1] * len(values))


def grouped_interval(sums: Sequence[float], counts: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values in groups and half of its 95 % interval, infinite for one group."""
    result = grouped_mean(sums, counts)
    return result.mean, result.half_interval


def grouped_mean(sums: Sequence[float], counts: Sequence[float]) -> GroupedMean:
    """Return the mean of values in groups with its standard error.

    Values of a group are alike, as the tokens of one text are: groups are what is independent.
    Counts that are sums of another quantity give the ratio of both, with the error of a ratio.
    """
    groups = len(sums)
    total = sum(counts)
    mean = sum(sums) / total
    if groups == 1:
        return GroupedMean(mean, math.inf, 1)
    residuals = sum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    error = math.sqrt(residuals * groups / (groups - 1)) / abs(total)
    return GroupedMean(mean, error, groups)
