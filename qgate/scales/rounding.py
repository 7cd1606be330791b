"""Round ascending numbers to a format by the edges between its values, which are found once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from qgate.formats import ElementFormat
from qgate.stats import serial

Floats = npt.NDArray[np.float64]
Predicate = Callable[[Floats], npt.NDArray[np.bool_]]
_MOST_BITS = 8


def round_rows(fmt: ElementFormat, rows: Floats) -> Floats:
    """Return what `fmt.nearest` returns for rows of numbers from zero up, each ascending."""
    count, length = rows.shape
    table = _values_and_edges(fmt) if fmt.bits <= _MOST_BITS else None
    if table is None or len(table[0]) > length:
        with serial():
            return np.asarray(fmt.nearest(torch.from_numpy(rows)).numpy())
    values, edges = table
    starts = np.empty((count, len(values) + 1), dtype=np.int64)
    starts[:, 0], starts[:, -1] = 0, length
    for row, places in zip(rows, starts, strict=True):
        places[1:-1] = np.searchsorted(row, edges)
    repeats = np.diff(starts, axis=1).reshape(-1)
    return np.repeat(np.tile(values, count), repeats).reshape(rows.shape)


@lru_cache(maxsize=64)
def _values_and_edges(fmt: ElementFormat) -> tuple[Floats, Floats] | None:
    """Return the magnitudes of a format, and the first number that rounds to each but zero."""
    values = fmt.magnitudes()
    edges = first_number(
        lambda x: np.asarray(fmt.nearest(torch.from_numpy(x)).numpy() >= values[1:]),
        values[:-1],
        values[1:],
    )
    return None if edges is None else (values, edges)


def first_number(is_at: Predicate, low: Floats, high: Floats) -> Floats | None:
    """Return the first number for which a rising predicate is true, from below to above."""
    if not np.isfinite(high).all() or is_at(low).any() or not is_at(high).all():
        return None
    # Bits of positive numbers are in the order of the numbers.
    below, above = low.view(np.int64).copy(), high.view(np.int64).copy()
    while (above - below > 1).any():
        middle = below + (above - below) // 2
        hit = is_at(middle.view(np.float64))
        above, below = np.where(hit, middle, above), np.where(hit, below, middle)
    return above.view(np.float64)
