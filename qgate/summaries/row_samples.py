"""A sample of a tensor's rows that stands for all of them.

Few rows of very large values decide an error that is the sum of squares. So rows are drawn by the
power of two of their largest magnitude, some of each, and each stands for the rows of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.stats.summary import Floats, Ints

EACH = 4
"""Rows of each power of two that are drawn at least."""
OCTAVES = 2304
"""Powers of two that magnitudes of float64 can have, and one for rows of zeros."""
_LOWEST = -1100


@dataclass(frozen=True, eq=False)
class RowSample:
    """Rows by kind, and how many of the tensor's rows each kind has."""

    kinds: tuple[tuple[Tensor, int], ...]

    @property
    def rows(self) -> int:
        return sum(len(rows) for rows, _ in self.kinds)

    @property
    def elements(self) -> int:
        return sum(rows.numel() for rows, _ in self.kinds)

    @property
    def of(self) -> int:
        """The rows that it stands for."""
        return sum(of for _, of in self.kinds)

    def values(self) -> tuple[Floats, Floats | None]:
        """Return all values as float64, and how many each stands for; None where it is one."""
        values = np.concatenate([rows.reshape(-1).double().numpy() for rows, _ in self.kinds])
        if self.rows == self.of:
            return values, None
        shares = [np.full(rows.numel(), of / len(rows)) for rows, of in self.kinds]
        return values, np.concatenate(shares)

    def to(self, dtype: torch.dtype) -> RowSample:
        return RowSample(tuple((rows.to(dtype), of) for rows, of in self.kinds))


def all_rows(table: Tensor) -> RowSample:
    return RowSample(((table, len(table)),))


def by_kind(rows: Tensor, octaves: Ints, counts: Mapping[int, int] | Ints) -> RowSample:
    """Group drawn rows by power of two; `counts` are of all rows of each."""
    total = sum(int(counts[octave]) for octave in np.unique(octaves).tolist())
    if total == len(rows):
        return all_rows(rows)
    return RowSample(
        tuple(
            (rows[torch.from_numpy(np.flatnonzero(octaves == octave))], int(counts[octave]))
            for octave in np.unique(octaves).tolist()
        )
    )


def octaves_of(sizes: Floats) -> Ints:
    """Return the power of two of each row's largest magnitude, counted from 1; 0 for zeros."""
    exponents = np.frexp(np.nan_to_num(sizes, nan=0.0))[1].astype(np.int64)
    return np.where(sizes > 0, exponents - _LOWEST, 0)


def drawn(order: npt.NDArray[np.int64], octaves: Ints, most: int) -> npt.NDArray[np.int64]:
    """Return the first `most` rows of an order and the first of each power of two, ascending."""
    by_octave = order[np.argsort(octaves[order], kind="stable")]
    kinds = octaves[by_octave]
    place = np.arange(len(order)) - np.searchsorted(kinds, kinds, side="left")
    keep = np.zeros(len(order), dtype=np.bool_)
    keep[order[:most]] = True
    keep[by_octave[place < EACH]] = True
    return np.flatnonzero(keep)
