"""Paired changes of samples: the interval of their mean, and the samples that moved most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Two-sided 95 % of Student's t by degrees of freedom; beyond the table, of the normal.
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 14: 2.14, 19: 2.09, 29: 2.05}  # fmt: skip  # noqa: E501
_MOVED = 3
# Bits per byte that sums of float64 numbers cannot tell from none.
_LEAST = 1e-12


@dataclass(frozen=True)
class PairedChange:
    """Mean change of samples with its 95 % interval, and all changes, the largest first."""

    mean: float
    low: float
    high: float
    changes: tuple[tuple[int, float], ...]

    @property
    def largest(self) -> float:
        """Return how far from zero the mean may be, on either side."""
        return max(abs(self.low), abs(self.high))

    def text(self) -> str:
        """Write the mean with its interval, and the samples that moved most."""
        moved = [
            f"{number} by {_figure(change)}" for number, change in self.changes[:_MOVED] if change
        ]
        if len(self.changes) == 1:
            return f"{_figure(self.mean)} of one sample, which has no interval"
        mean = (
            f"{_figure(self.mean)} in the mean of {len(self.changes)} samples, 95 % interval "
            f"{_figure(self.low)} to {_figure(self.high)}"
        )
        return f"{mean}; most moved: sample {', '.join(moved)}" if moved else mean


def paired_change(before: Mapping[int, float], now: Mapping[int, float]) -> PairedChange:
    """Compare the figures of samples, by number; a single sample has no interval.

    Two or three samples are not enough for an interval of the mean: it is no wider, to each side,
    than their changes lie apart.
    """
    changes = {number: now[number] - before[number] for number in before}
    mean, half = mean_interval([*changes.values()])
    half = min(half, max(changes.values()) - min(changes.values()))
    ordered = sorted(changes.items(), key=lambda change: (-abs(change[1]), change[0]))
    return PairedChange(mean, mean - half, mean + half, tuple(ordered))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values and half of its 95 % interval, infinite for a single one."""
    count = len(values)
    mean = sum(values) / count
    if count == 1:
        return mean, math.inf
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    degrees = max(entry for entry in _T95 if entry <= count - 1)
    return mean, (_T95[degrees] if count <= 30 else 1.96) * spread / math.sqrt(count)


def _figure(value: float) -> str:
    return f"{value:+.2g}" if abs(value) > _LEAST else "0"
