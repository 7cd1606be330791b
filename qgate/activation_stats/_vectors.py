"""Figures of one vector of magnitudes per sample, as exact sums over samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qgate.activation_stats._exact import ExactSum
from qgate.activation_stats._tensor_pass import ENDS, Figures, TensorReading, figures_of
from qgate.activation_stats.record import Magnitude

Floats = npt.NDArray[np.float64]


class Vector:
    """Figures of one vector per sample, as sums."""

    def __init__(self) -> None:
        self.top, self.low = ([ExactSum() for _ in range(ENDS)] for _ in range(2))
        self.top_n = [0] * ENDS
        self.median, self.n, self.most = ExactSum(), 0, 0.0

    def add(self, top: Sequence[float], median: float, low: Sequence[float]) -> None:
        for k, (high, small) in enumerate(zip(top, low, strict=True)):
            self.top[k].add(high)
            self.low[k].add(small)
            self.top_n[k] += 1
        self.median.add(median)
        self.n += len(top) > 0
        self.most = max(self.most, *top, 0.0)

    def merge(self, other: Vector) -> None:
        for k in range(ENDS):
            self.top[k].merge(other.top[k])
            self.low[k].merge(other.low[k])
            self.top_n[k] += other.top_n[k]
        self.median.merge(other.median)
        self.n += other.n
        self.most = max(self.most, other.most)

    def magnitude(self) -> Magnitude | None:
        if not self.n:
            return None
        there = [k for k in range(ENDS) if self.top_n[k]]
        return Magnitude(
            top=[self.top[k].value() / self.top_n[k] for k in there],
            median=self.median.value() / self.n,
            low=[self.low[k].value() / self.top_n[k] for k in there],
            most=self.most,
        )


@dataclass(frozen=True)
class CallVectors:
    """Magnitudes of a call."""

    tokens: Floats
    channels: Floats
    token_figures: Figures
    channel_figures: Figures

    @staticmethod
    def of(reading: TensorReading) -> CallVectors:
        figures = reading.token_figures, reading.channel_figures
        return CallVectors(reading.tokens, reading.channels, *figures)

    @staticmethod
    def together(calls: Sequence[CallVectors]) -> CallVectors:
        """Of all tokens of a sample."""
        tokens = np.concatenate([each.tokens for each in calls])
        channels = np.zeros(0)
        for each in calls:
            channels = largest_of(channels, each.channels)
        return CallVectors(tokens, channels, figures_of(tokens), figures_of(channels))


def largest_of(a: Floats, b: Floats, fill: float = 0.0, of: np.ufunc = np.fmax) -> Floats:
    """Written into `a` where it is wide enough."""
    if len(a) < len(b):
        a = np.concatenate([a, np.full(len(b) - len(a), fill)])
    of(a[: len(b)], b, out=a[: len(b)])
    return a
