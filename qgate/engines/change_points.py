"""The step at which a series of figures begins to drift, with the chance that it does not drift.

Every beginning is tried, as a jump and as a ramp of the logarithm, and the best of them is compared
with the best of random series without a drift, whose neighboring steps are as alike as those of
this one. A single step that stands out is brought back before, so that a bad batch is no drift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qgate.engines.scored import FloatArray

FEWEST_STEPS = 15
LEAST_RATIO = 1.1
"""Last level over first below which a change is too small to report."""
_EDGE = 3
"""Steps that there are before and after each beginning at least."""
_MOST_COMPARED = 150
"""Values that a change is looked for in; of more steps each value stands for several."""
_SERIES = 20_000
_LIKELY = 7.35
"""Difference of twice the log-likelihood that holds 95 % of the places where a change may be."""
_LOWEST = 0.1
"""Share of the median that is added before a logarithm is taken, for figures that are zero."""
_SPIKE, _FAR = 3.0, 10.0
"""Standard deviations that a step may stand out from both neighbors, and that show any drift."""
_TO_DEVIATION = 1.4826
"""Standard deviation of normal values over their median distance from the median."""
_MOST_ALIKE, _DOUBT = 0.9, 0.5
"""Largest correlation of neighboring steps, and how many of its standard errors are added to it."""


@dataclass(frozen=True)
class ChangePoint:
    """A drift of a series.

    start        index of the first value that belongs to it
    first, last  indices between which it begins with 95 % confidence
    chance       that a series without a drift looks as much like one
    before       median of the values before; after: of the last ones
    is_ramp      whether it grows, and does not jump to a level
    """

    start: int
    first: int
    last: int
    chance: float
    before: float
    after: float
    is_ramp: bool

    @property
    def ratio(self) -> float:
        return self.after / self.before if self.before > 0 else math.inf


def find_change(values: Sequence[float], seed: int = 0) -> ChangePoint | None:
    """Find where a series changes most; None if it is too short or does not move."""
    series = np.asarray(values, np.float64)
    if len(series) < FEWEST_STEPS or series.min() == series.max():
        return None
    logs = np.log(series + _LOWEST * float(np.median(series[series > 0])))
    calm = _without_spikes(logs)
    scores = _blocks(calm)
    directions = _directions(len(scores))
    alike = _likeness(scores)
    size = _largest(scores[None], directions)[0]
    drawn_sizes = _largest(_series_without_drift(len(scores), alike, seed), directions)
    chance = float((1 + (drawn_sizes >= size * (1 - 1e-9)).sum()) / (1 + len(drawn_sizes)))
    return _located(series, calm, chance, alike)


def _without_spikes(logs: FloatArray) -> FloatArray:
    """Bring values that stand out from both neighbors back to where noise would have them."""
    width = _SPIKE * _spread(logs)
    inner = np.median(np.stack([logs[:-2], logs[1:-1], logs[2:]]), 0)
    middle = np.concatenate([inner[:1], inner, inner[-1:]])
    return np.clip(logs, middle - width, middle + width)


def _spread(logs: FloatArray) -> float:
    """Return the standard deviation of steps beside a drift, from those of neighbors."""
    return _TO_DEVIATION * float(np.median(np.abs(np.diff(logs)))) / math.sqrt(2)


def _blocks(series: FloatArray) -> FloatArray:
    """Return means of so many steps that there are not too many values."""
    size = -(-len(series) // _MOST_COMPARED)
    starts = range(0, len(series) - size + 1, size)
    return np.array([series[start : start + size].mean() for start in starts])


def _directions(count: int) -> FloatArray:
    """Return a unit vector without a mean for each beginning, as a jump and as a ramp."""
    at = np.arange(count)
    starts = np.arange(_EDGE, count - _EDGE + 1)
    jumps = (at[:, None] >= starts).astype(np.float64)
    shapes = np.concatenate([jumps, np.maximum(at[:, None] - starts + 1.0, 0.0)], 1)
    shapes -= shapes.mean(0)
    unit: FloatArray = shapes / np.sqrt(np.square(shapes).sum(0))
    return unit


def _largest(scores: FloatArray, directions: FloatArray) -> FloatArray:
    """Return the largest share of the variance that a drift explains, of each series."""
    centered = scores - scores.mean(1, keepdims=True)
    explained = np.square(centered @ directions).max(1)
    shares: FloatArray = explained / np.maximum(np.square(centered).sum(1), 1e-300)
    return shares


def _likeness(scores: FloatArray) -> float:
    """Estimate the correlation of neighboring steps beside a drift, rather too high."""
    at = np.arange(len(scores), dtype=np.float64)
    best = (math.inf, scores)
    for start in range(_EDGE, len(scores) - _EDGE + 1):
        columns = [np.ones_like(at), (at >= start) * 1.0, np.maximum(at - start, 0.0)]
        design = np.stack(columns, 1)
        residuals = scores - design @ np.linalg.lstsq(design, scores, rcond=None)[0]
        best = min(best, (float(np.square(residuals).sum()), residuals), key=lambda fit: fit[0])
    energy, residuals = best
    if energy < 1e-12:
        return 0.0
    count = len(scores)
    correlation = float((residuals[1:] * residuals[:-1]).sum()) / energy
    # What is fitted takes correlation away: the mean about 1 + 4 r of n, and three lines thrice it.
    corrected = max((correlation * count + 3) / (count - 6), 0.0)
    return min(corrected + _DOUBT / math.sqrt(count), _MOST_ALIKE)


def _series_without_drift(count: int, alike: float, seed: int) -> FloatArray:
    """Draw series in which a step is like the one before it, and nothing drifts."""
    draw = np.random.default_rng(seed)
    noise = draw.standard_normal((count, _SERIES))
    for at in range(1, count):
        noise[at] = alike * noise[at - 1] + math.sqrt(1 - alike * alike) * noise[at]
    return noise.T


def _located(series: FloatArray, logs: FloatArray, chance: float, alike: float) -> ChangePoint:
    """Say where a drift begins: where a jump or a ramp leaves least of the logarithms."""
    # A drift that grows faster and faster is no ramp: what is far beyond noise says nothing more.
    first = logs[: max(len(logs) // 4, 2 * _EDGE)]
    far = np.abs(logs - np.median(first)) > _FAR * _spread(first)
    lasting = far[:-2] & far[1:-1] & far[2:]
    stop = int(lasting.argmax()) + _EDGE if lasting.any() else len(logs)
    jumps, ramps = _left_over(logs[: max(stop, 2 * _EDGE + 1)])
    best = np.minimum(jumps, ramps)
    start = int(best.argmin())
    independent = stop * (1 - alike) / (1 + alike)
    likely = np.flatnonzero(independent * np.log(best / best[start]) <= _LIKELY)
    is_ramp = bool(ramps[start] < jumps[start])
    tail = series[-_EDGE:] if is_ramp else series[start + _EDGE :]
    return ChangePoint(
        start + _EDGE,
        int(likely[0]) + _EDGE,
        int(likely[-1]) + _EDGE,
        chance,
        float(np.median(series[: start + _EDGE])),
        float(np.median(tail)),
        is_ramp,
    )


def _left_over(logs: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return what a jump and what a ramp at each beginning leave of the squares."""
    centered = logs - logs.mean()
    whole = float(np.square(centered).sum())
    squares = np.maximum(whole - np.square(centered @ _directions(len(logs))), 1e-12 * whole)
    jumps, ramps = squares.reshape(2, -1)
    return jumps, ramps
