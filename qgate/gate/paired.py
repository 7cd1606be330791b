"""Paired changes of samples: the interval of their mean, and the samples that moved most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qgate.metrics.intervals import mean_interval

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


def _figure(value: float) -> str:
    return f"{value:+.2g}" if abs(value) > _LEAST else "0"
