"""A seeded share of the rows of a layer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.hashing import Hashes, mix_bits

Bits = npt.NDArray[Any]
_WAIT = 8  # so many rows are held for each that waits
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class RowShare:
    """At most `room` rows of a layer: those with the smallest hashes of sample, call and row.

    The order and the split of the samples make no difference. Rows of another width than the first
    are left out. Rows are kept as plain bits: torch would send other processes a memory address.
    New rows wait until there are some, and take the places of those that they drive out.
    """

    def __init__(self, room: int, seed: int = 0) -> None:
        self.room, self.seed = room, seed
        self._hashes: Hashes = np.empty(0, dtype=np.uint64)
        self._largest = np.uint64(2**64 - 1)
        self._bits: Bits | None = None
        self._dtype = torch.float32
        self._waiting: list[tuple[Hashes, Bits]] = []

    def add(self, table: Tensor, sample: int, call: int) -> None:
        hashes = _hashes(self.seed, sample, call, table.shape[0])
        chosen = np.flatnonzero(hashes < self._largest)
        if len(chosen) > self.room:
            chosen = chosen[np.argpartition(hashes[chosen], self.room - 1)[: self.room]]
        if len(chosen):
            self._keep(hashes[chosen], table.index_select(0, torch.from_numpy(chosen)))

    def merge(self, other: RowShare) -> None:
        if (rows := other.rows()) is not None:
            self._keep(np.sort(other._hashes), rows)

    @property
    def width(self) -> int:
        """0 while there are no rows."""
        return 0 if self._bits is None else self._bits.shape[1]

    def _keep(self, hashes: Hashes, rows: Tensor) -> None:
        if self._bits is None:
            self._dtype = rows.dtype
            self._bits = _bits_of(rows[:0])
        if self.width == rows.shape[1]:
            self._waiting.append((hashes, _bits_of(rows.to(self._dtype))))
            count = sum(len(waiting) for waiting, _ in self._waiting)
            if len(self._hashes) < self.room or count > self.room // _WAIT:
                self._settle()

    def _settle(self) -> None:
        """Choose among the rows that are held and those that wait."""
        if self._bits is None or not self._waiting:
            return
        hashes, bits = map(np.concatenate, zip(*self._waiting, strict=True))
        held = len(self._hashes)
        both = np.concatenate([self._hashes, hashes])
        last = min(self.room, len(both)) - 1
        kept, dropped = np.split(np.argpartition(both, last), [last + 1])
        if held < self.room:
            self._hashes, self._bits = both[kept], np.concatenate([self._bits, bits])[kept]
        else:
            new, driven_out = kept[kept >= held] - held, dropped[dropped < held]
            self._hashes[driven_out], self._bits[driven_out] = hashes[new], bits[new]
        if len(self._hashes) == self.room:
            self._largest = self._hashes.max()
        self._waiting = []

    def rows(self) -> Tensor | None:
        """Return them in the order of their hashes."""
        self._settle()
        if self._bits is None:
            return None
        return torch.from_numpy(self._bits[np.argsort(self._hashes)]).view(self._dtype)


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
