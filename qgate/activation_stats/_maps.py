"""One sample's magnitudes as a picture of at most 96 by 160 cells that loses no peak."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from qgate.activation_stats._tensor_pass import TensorReading, chunks
from qgate.activation_stats.record import HeatMap

ROWS, COLUMNS = 96, 160


def heat_map(reading: TensorReading, sample: int) -> HeatMap:
    """A cell is the largest finite magnitude in it; the figures are of all magnitudes."""
    tokens, channels = reading.table.shape
    starts = _starts(channels, COLUMNS)
    lines: list[npt.NDArray[np.float64]] = []
    total = square = 0.0
    for part in chunks(reading.table):
        sizes = part.abs() if reading.finite else part.where(part.isfinite(), 0.0).abs()
        total += float(sizes.double().sum())
        square += float(sizes.double().square().sum())
        lines.append(np.maximum.reduceat(sizes.double().numpy(), starts, axis=1))
    made = HeatMap(sample=sample, tokens=tokens, channels=channels, cells=[], stats={})
    n = tokens * channels
    if not n:
        return made
    pooled = np.maximum.reduceat(np.concatenate(lines), _starts(tokens, ROWS), axis=0)
    made["cells"] = pooled.tolist()
    mean = total / n
    std = max(square / n - mean * mean, 0.0) ** 0.5
    beyond = sum(int((part.abs() > mean + 3 * std).sum()) for part in chunks(reading.table))
    p99 = reading.size_quantile(0.99)
    least = min(float(part.abs().nan_to_num(math.inf).min()) for part in chunks(reading.table))
    made["stats"] = {"mean": mean, "std": std, "max": reading.amax, "p99": p99}
    if math.isfinite(least):
        made["stats"]["min"] = least
    made["stats"]["beyond_3_std"] = float(beyond)
    if p99 > 0:
        made["stats"]["max_over_p99"] = reading.amax / p99
    return made


def _starts(n: int, most: int) -> npt.NDArray[np.int64]:
    cells = min(n, most)
    return np.arange(cells) * n // max(cells, 1)
