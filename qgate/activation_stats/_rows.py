"""A seeded share of the rows of a layer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.hashing import Hashes, mix_bits

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class RowShare:
    """At most `room` rows of a layer: those with the smallest hashes of sample, call and row.

    The order and the split of the samples make no difference. Rows of another width than the first
    are left out. Rows are kept as plain bits: torch would send other processes a memory address.
    A new row takes the place of the one that it drives out.
    """

    def __init__(self, room: int, seed: int = 0) -> None:
        self.room, self.seed = room, seed
        self._hashes: Hashes = np.empty(0, dtype=np.uint64)
        self._bits: npt.NDArray[Any] | None = None
        self._dtype = torch.float32

    def add(self, table: Tensor, sample: int, call: int) -> None:
        hashes = _hashes(self.seed, sample, call, table.shape[0])
        if len(self._hashes) == self.room:
            chosen = np.flatnonzero(hashes < self._hashes.max())
        else:
            chosen = np.arange(len(hashes))
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
        if self.width != rows.shape[1]:
            return
        bits, held = _bits_of(rows.to(self._dtype)), len(self._hashes)
        both = np.concatenate([self._hashes, hashes])
        last = min(self.room, len(both)) - 1
        kept, dropped = np.split(np.argpartition(both, last), [last + 1])
        if held < self.room:
            self._hashes, self._bits = both[kept], np.concatenate([self._bits, bits])[kept]
            return
        new = kept[kept >= held] - held
        driven_out = dropped[dropped < held]
        self._hashes[driven_out], self._bits[driven_out] = hashes[new], bits[new]

    def rows(self) -> Tensor | None:
        """Return them in the order of their hashes."""
        if self._bits is None:
            return None
        return torch.from_numpy(self._bits[np.argsort(self._hashes)]).view(self._dtype)


def _bits_of(rows: Tensor) -> npt.NDArray[Any]:
    bits: npt.NDArray[Any] = rows.view(_BITS[rows.dtype.itemsize]).numpy()
    return bits


@lru_cache(maxsize=16)
def _hashes(seed: int, sample: int, call: int, count: int) -> Hashes:
    """Hash sample, call and number of rows."""
    base = (seed * 0x9E3779B97F4A7C15 + sample * 0xD1342543DE82EF95 + call * 0xAF251AF3B0F025B5) % (
        2**64
    )
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return mix_bits(steps + np.uint64(base))
