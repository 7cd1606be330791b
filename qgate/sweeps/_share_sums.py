"""Error sums of a codebook at several shares of its blocks' scales, by quantizing at each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.formats import BlockFormat, Quantizer
from qgate.formats.engine.effects import error_squares, outcomes
from qgate.formats.engine.job import Job, split
from qgate.scales.levels import Level
from qgate.stats import errors


class ShareSums:
    """Sums per level; elements of blocks with NaN or Inf are left out.

    Levels of a codebook are no grid, so that nothing underflows but what becomes zero.
    """

    def __init__(self, x: Tensor, fmt: BlockFormat, levels: Sequence[Level], axis: int) -> None:
        self.fmt, self.n, self.r_square = fmt, 0, 0.0
        self.saturated, self.flushed, self.saturated_noise, self.flushed_energy = np.zeros(
            (4, len(levels))
        )
        self.clamped = self.broken = np.zeros(len(levels), dtype=bool)
        self._metrics: list[dict[str, float]] = []
        for number, level in enumerate(levels):
            self._add(x, Quantizer(scaled(fmt, level.factor), axis=axis), number)

    @property
    def underflow(self) -> np.ndarray:
        return self.flushed

    def _add(self, x: Tensor, q: Quantizer, number: int) -> None:
        job, pairs = Job(x, q, counting=True), []
        self.r_square = 0.0
        for _, _, wide, parts in split(job):
            hits = outcomes(wide, parts, q)
            squares = error_squares(wide, parts, hits).tolist()
            self.r_square += squares[0]
            self.saturated_noise[number] += squares[2]
            self.saturated[number] += int((hits["upper"] | hits["lower"]).sum())
            self.flushed[number] += int(hits["flushed"].sum())
            self.flushed_energy[number] += float(wide[hits["flushed"]].square().sum())
            sound = ~parts.scale.isnan().expand_as(wide)
            pairs.append(((parts.elements * parts.scale)[sound], wide[sound]))
        measured = errors((actual for actual, _ in pairs), (source for _, source in pairs), worst=0)
        self.n = measured.elements
        self._metrics.append(measured.metrics())

    def metrics(self) -> list[dict[str, float]]:
        """Return all metrics of each level."""
        return self._metrics


def scaled(fmt: BlockFormat, share: float) -> BlockFormat:
    """Return a format with so many times its blocks' scales."""
    shared = fmt.with_share(share)
    if shared is None:
        raise QgateError(f"{fmt.name} chooses its own scales, so there is none to sweep.")
    return shared


def without_massive_at(
    x: Tensor, fmt: BlockFormat, share: float, axis: int, beyond: float
) -> tuple[float, int]:
    """Return the SQNR of the elements up to a magnitude, and the number beyond it."""
    y = Quantizer(scaled(fmt, share), axis=axis, dtype=torch.float64)(x)
    sound = x.isfinite() & y.isfinite()
    small = sound & (x.abs() <= beyond)
    ratio = errors(y[small], x[small].double(), worst=0).metric("sqnr_db")
    return ratio, int(sound.sum() - small.sum())
