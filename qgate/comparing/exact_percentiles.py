"""Exact percentiles of values that are read in portions, in two passes and little memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_SHIFT = 47
"""Bits below the exponent and five more: 32 groups per power of two, in the order of magnitudes."""
_GROUPS = 1 << 16


def exact_percentiles(
    portions: Callable[[], Iterable[Array]], percents: Sequence[int]
) -> list[float]:
    """Return the smallest magnitudes that so many percent do not exceed; NaN without values.

    `portions` starts a pass over all values, which are finite. The first pass counts them by group,
    the second keeps those of the groups that hold a percentile.
    """
    counts = np.zeros(_GROUPS, dtype=np.int64)
    for part in portions():
        counts += np.bincount(_groups(np.abs(part)), minlength=_GROUPS)
    ends = np.cumsum(counts)
    total = int(ends[-1])
    if not total:
        return [math.nan] * len(percents)
    ranks = [max(-(-percent * total // 100), 1) for percent in percents]
    groups = [int(group) for group in np.searchsorted(ends, ranks)]
    parts_of: dict[int, list[Array]] = {group: [] for group in groups}
    for part in portions():
        sizes = np.abs(part)
        group_of = _groups(sizes)
        for group, parts in parts_of.items():
            parts.append(sizes.reshape(-1)[group_of == group])
    values = {group: np.sort(np.concatenate(parts)) for group, parts in parts_of.items()}
    before = ends - counts
    return [
        float(values[group][rank - 1 - before[group]])
        for rank, group in zip(ranks, groups, strict=True)
    ]


def _groups(sizes: Array) -> npt.NDArray[np.int64]:
    """Return the group of each magnitude: no larger one is in an earlier group."""
    bits = np.ascontiguousarray(sizes, dtype=np.float64).reshape(-1).view(np.int64)
    return bits >> _SHIFT
