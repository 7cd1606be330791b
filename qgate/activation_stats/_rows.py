"""A seeded share of the rows of a layer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.hashing import Hashes, mix_bits
from qgate.stats.summary import Floats, Ints
from qgate.summaries.row_samples import (
    EACH,
    OCTAVES,
    RowSample,
    all_rows,
    by_kind,
    drawn,
    octaves_of,
)

Bits = npt.NDArray[Any]
_NO_LIMIT = np.uint64(2**64 - 1)
_WAIT = 8  # so many rows are held for each that waits
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class RowShare:
    """At most `room` rows of a layer, and some of each power of two of their largest magnitude:
    those with the smallest hashes of sample, call and row.

    The order and the split of the samples make no difference. Rows of another width than the first
    are left out. Rows are kept as plain bits: torch would send other processes a memory address.
    New rows wait until there are some.
    """

    def __init__(self, room: int, seed: int = 0) -> None:
        self.room, self.seed = room, seed
        self.counts = np.zeros(OCTAVES, dtype=np.int64)
        """How many rows of each power of two there were."""
        self._hashes: Hashes = np.empty(0, dtype=np.uint64)
        self._octaves: Ints = np.empty(0, dtype=np.int64)
        # The largest hash that stays, of all rows and of each power of two.
        self._largest = _NO_LIMIT
        self._limits = np.full(OCTAVES, _NO_LIMIT)
        self._bits: Bits | None = None
        self._dtype = torch.float32
        self._waiting: list[tuple[Hashes, Ints, Bits]] = []

    def add(self, table: Tensor, sizes: Floats, sample: int, call: int) -> None:
        """Take the rows of a call; `sizes` are their largest magnitudes."""
        if self.width not in (0, table.shape[1]):
            return
        hashes, octaves = _hashes(self.seed, sample, call, table.shape[0]), octaves_of(sizes)
        self.counts += np.bincount(octaves, minlength=OCTAVES)
        chosen = np.flatnonzero(hashes < np.maximum(self._largest, self._limits[octaves]))
        if len(chosen) > self.room:
            chosen = chosen[drawn(np.argsort(hashes[chosen]), octaves[chosen], self.room)]
        if len(chosen):
            rows = table.index_select(0, torch.from_numpy(chosen))
            self._keep(hashes[chosen], octaves[chosen], rows)

    def merge(self, other: RowShare) -> None:
        other._settle()
        if other._bits is not None and self.width in (0, other.width):
            self.counts += other.counts
            rows = torch.from_numpy(other._bits).view(other._dtype)
            self._keep(other._hashes, other._octaves, rows)

    @property
    def width(self) -> int:
        """0 while there are no rows."""
        return 0 if self._bits is None else self._bits.shape[1]

    def _keep(self, hashes: Hashes, octaves: Ints, rows: Tensor) -> None:
        if self._bits is None:
            self._dtype = rows.dtype
            self._bits = _bits_of(rows[:0])
        self._waiting.append((hashes, octaves, _bits_of(rows.to(self._dtype))))
        count = sum(len(waiting) for waiting, *_ in self._waiting)
        if len(self._hashes) < self.room or count > self.room // _WAIT:
            self._settle()

    def _settle(self) -> None:
        """Choose among the rows that are held and those that wait."""
        if self._bits is None or not self._waiting:
            return
        parts = [(self._hashes, self._octaves, self._bits), *self._waiting]
        hashes, octaves, bits = map(np.concatenate, zip(*parts, strict=True))
        rows = drawn(np.argsort(hashes), octaves, self.room)
        self._hashes, self._octaves, self._bits = hashes[rows], octaves[rows], bits[rows]
        if len(rows) >= self.room:
            self._largest = np.partition(self._hashes, self.room - 1)[self.room - 1]
        for octave in np.unique(self._octaves):
            own = self._hashes[self._octaves == octave]
            if len(own) >= EACH:
                self._limits[octave] = np.partition(own, EACH - 1)[EACH - 1]
        self._waiting = []

    def rows(self) -> Tensor | None:
        """Return at most `room` in the order of their hashes."""
        self._settle()
        if self._bits is None:
            return None
        return self._ordered(np.argsort(self._hashes)[: self.room])

    def sample(self, most: int) -> RowSample:
        """Return `most` rows and some of each power of two, which stand for all."""
        self._settle()
        if self._bits is None:
            return all_rows(torch.empty(0, 1))
        order = np.argsort(self._hashes)
        is_sampled = np.zeros(len(order), dtype=np.bool_)
        is_sampled[drawn(order, self._octaves, most)] = True
        order = order[is_sampled[order]]
        return by_kind(self._ordered(order), self._octaves[order], self.counts)

    def _ordered(self, order: Ints) -> Tensor:
        assert self._bits is not None
        return torch.from_numpy(self._bits[order]).view(self._dtype)


def _bits_of(rows: Tensor) -> Bits:
    bits: Bits = rows.view(_BITS[rows.dtype.itemsize]).numpy()
    return bits


@lru_cache(maxsize=16)
def _hashes(seed: int, sample: int, call: int, count: int) -> Hashes:
    """Hash sample, call and number of rows."""
    base = (seed * 0x9E3779B97F4A7C15 + sample * 0xD1342543DE82EF95 + call * 0xAF251AF3B0F025B5) % (
        2**64
    )
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return mix_bits(steps + np.uint64(base))
