"""Percentiles of |difference| in bounded memory: counts by the leading bits of the number."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch

from qgate.errors import QgateError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SHIFT = 45  # of the 64 bits: 11 of exponent and 7 of fraction stay
KEYS = 2 ** (63 - SHIFT)
RELATIVE_ERROR = 2.0**-8


class DifferenceCounts:
    """How many |differences| have the same exponent and first 7 fraction bits.

    Values with one key differ by less than 1 part in 2^7, and the middle of them is within 1 part
    in 2^8 of each. Zero has its key to itself, except for differences below 2^-1029.
    """

    def __init__(self, keys: Ints, counts: Ints) -> None:
        self.keys, self.counts = keys, counts

    def __add__(self, other: DifferenceCounts) -> DifferenceCounts:
        keys, place = np.unique(np.concatenate([self.keys, other.keys]), return_inverse=True)
        counts = np.zeros(len(keys), np.int64)
        np.add.at(counts, place, np.concatenate([self.counts, other.counts]))
        return DifferenceCounts(keys, counts)

    def percentile(self, q: float, largest: float) -> float:
        """The smallest value that at least q percent do not exceed, to `RELATIVE_ERROR`.

        `largest` is the exact maximum: no estimate exceeds it, and it is the answer where the rank
        is the last. NaN without values.
        """
        if not 0 <= q <= 100:
            raise QgateError(f"percentile {q} is not between 0 and 100.")
        total = int(self.counts.sum())
        if not total:
            return math.nan
        rank = max(math.ceil(Fraction(str(q)) * total / 100), 1)
        if rank == total:
            return largest
        key = self.keys[np.searchsorted(np.cumsum(self.counts), rank)]
        if not key:
            return 0.0
        middle = np.int64(key << SHIFT | 1 << (SHIFT - 1)).view(np.float64)
        return min(float(middle), largest)


class KeyTable:
    """The counts while they are collected: looks large, but the system gives memory only to the
    parts that are touched."""

    def __init__(self, room: int) -> None:
        self._table = np.zeros(KEYS, np.int64)
        self._counted = torch.from_numpy(self._table)
        self._ones = torch.ones(room, dtype=torch.int64, device="cpu")

    def add(self, magnitudes: Floats, scratch: Floats, zeros: int) -> None:
        """Count all magnitudes except for so many zeros; `scratch` of that size is overwritten."""
        keys = scratch.view(np.int64)
        np.right_shift(magnitudes.view(np.int64), SHIFT, out=keys)
        self._counted.scatter_add_(0, torch.from_numpy(keys), self._ones[: len(keys)])
        self._table[0] -= zeros

    def counts(self) -> DifferenceCounts:
        keys = np.flatnonzero(self._table)
        return DifferenceCounts(keys, self._table[keys])
