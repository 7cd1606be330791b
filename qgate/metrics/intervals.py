"""Intervals of means, of single values and of groups whose values are alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Two-sided 95 % of Student's t by degrees of freedom; beyond the table, of the normal.
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 14: 2.14, 19: 2.09, 29: 2.05}  # fmt: skip  # noqa: E501


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values and half of its 95 % interval, infinite for a single one."""
    return grouped_interval(values, [1] * len(values))


def grouped_interval(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """Return the mean of values in groups and half of its 95 % interval, infinite for one group.

    Values of a group are alike, as the tokens of one text are: groups are what is independent.
    """
    groups = len(sums)
    total = sum(counts)
    mean = sum(sums) / total
    if groups == 1:
        return mean, math.inf
    residuals = sum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    spread = math.sqrt(residuals * groups / (groups - 1)) / total
    degrees = max(entry for entry in _T95 if entry <= groups - 1)
    return mean, (_T95[degrees] if groups <= 30 else 1.96) * spread
