"""What a stream of tensors leaves behind of its values: their counts, and a seeded few rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.activation_stats._tensor_pass import PAGE

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
_FIRST = 64
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PatternCounts:
    """Counts of 16-bit patterns in pages of 128 that are made when they are needed.

    Values of a layer share a few dozen exponents: 50 KB in place of half a megabyte.
    """

    def __init__(self) -> None:
        self._place = np.full(2**16 // PAGE, -1, dtype=np.int64)
        self._pages = np.zeros((_FIRST, PAGE), dtype=np.int64)
        self._used = 0

    def add(self, used: Ints, pages: Ints) -> None:
        """Counts of some pages, by their numbers."""
        new = used[self._place[used] < 0]
        if len(new):
            self._place[new] = self._used + np.arange(len(new))
            self._used += len(new)
            if self._used > len(self._pages):
                more = np.zeros((self._used + _FIRST // 2 - len(self._pages), PAGE), dtype=np.int64)
                self._pages = np.concatenate([self._pages, more])
        self._pages[self._place[used]] += pages

    def merge(self, other: PatternCounts) -> None:
        used = np.flatnonzero(other._place >= 0)
        self.add(used, other._pages[other._place[used]])

    def dense(self) -> Ints:
        found = np.zeros((2**16 // PAGE, PAGE), dtype=np.int64)
        there = self._place >= 0
        found[there] = self._pages[self._place[there]]
        return found.reshape(-1)

    @property
    def nbytes(self) -> int:
        return self._place.nbytes + self._pages.nbytes


class RowShare:
    """At most `room` rows of all that flowed: those with the smallest hash of where they are.

    Which ones does not depend on the order in which samples come, nor on how they are split. Rows
    of another width than the first are left out.
    """

    def __init__(self, room: int, seed: int = 0) -> None:
        self.room, self.seed = room, seed
        self._size = room + max(room // 2, 32)
        self._hashes: Hashes = np.empty(self._size, dtype=np.uint64)
        self._rows: Tensor | None = None
        self._held = 0
        self._ordered = True
        self._limit = np.uint64(2**64 - 1)

    def add(self, table: Tensor, sample: int, call: int) -> None:
        hashes = _hashes(self.seed, sample, call, len(table))
        chosen = np.flatnonzero(hashes < self._limit)
        if len(chosen):
            self._keep(chosen, hashes, table)

    def merge(self, other: RowShare) -> None:
        rows = other.rows()
        if rows is not None:
            self._keep(np.arange(len(rows)), other._hashes, rows)

    @property
    def width(self) -> int:
        """0 while there are no rows."""
        return 0 if self._rows is None else self._rows.shape[1]

    def __getstate__(self) -> dict[str, Any]:
        """To another process go the rows alone, without the room for more, as plain bits."""
        rows = self.rows()
        bits = None if rows is None else rows.view(_BITS[rows.dtype.itemsize]).numpy()
        kind = None if rows is None else rows.dtype
        hashes = self._hashes[: self._held]
        return {"room": self.room, "seed": self.seed, "hashes": hashes, "bits": bits, "kind": kind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["room"], state["seed"])  # type: ignore[misc]
        if state["bits"] is not None:
            rows = torch.from_numpy(state["bits"].copy()).view(state["kind"])
            self._keep(np.arange(len(rows)), state["hashes"], rows)
            self.rows()

    def _keep(self, chosen: Ints, hashes: Hashes, table: Tensor) -> None:
        """In memory of its own that stays where it is: pieces that are kept among those that are
        not would pin the heap."""
        if self._rows is None:
            self._rows = table.new_empty(self._size, table.shape[1])
        if self._rows.shape[1] != table.shape[1]:
            return
        if len(chosen) > self.room:
            chosen = chosen[np.argpartition(hashes[chosen], self.room - 1)[: self.room]]
        self._ordered = False
        while len(chosen):
            room = self._size - self._held
            part, chosen = chosen[:room], chosen[room:]
            end = self._held + len(part)
            self._hashes[self._held : end] = hashes[part]
            self._rows[self._held : end] = table.index_select(0, torch.from_numpy(part))
            self._held = end
            if end >= self.room and (len(chosen) or end == self._size or not self._full):
                self._settle()
                chosen = chosen[hashes[chosen] < self._limit]

    @property
    def _full(self) -> bool:
        return bool(self._limit < np.uint64(2**64 - 1))

    def _settle(self) -> None:
        """The rows that stay, in places of those that go."""
        assert self._rows is not None
        if self._held > self.room:
            order = np.argpartition(self._hashes[: self._held], self.room - 1)
            stay, go = order[: self.room], order[self.room :]
            come, free = stay[stay >= self.room], go[go < self.room]
            self._hashes[free] = self._hashes[come]
            self._rows[torch.from_numpy(free)] = self._rows[torch.from_numpy(come)]
            self._held = self.room
        if self._held == self.room:
            self._limit = self._hashes[: self._held].max()

    def rows(self) -> Tensor | None:
        """In the order of their hashes."""
        if self._rows is None:
            return None
        self._settle()
        if not self._ordered:
            order = np.argsort(self._hashes[: self._held])
            self._hashes[: self._held] = self._hashes[order]
            self._rows[: self._held] = self._rows[torch.from_numpy(order)]
            self._ordered = True
        return self._rows[: self._held]

    @property
    def nbytes(self) -> int:
        rows = 0 if self._rows is None else self._rows.numel() * self._rows.element_size()
        return rows + self._hashes.nbytes


@lru_cache(maxsize=16)
def _hashes(seed: int, sample: int, call: int, count: int) -> Hashes:
    """Numbers that look random and depend on the place alone (splitmix64)."""
    base = (seed * 0x9E3779B97F4A7C15 + sample * 0xD1342543DE82EF95 + call * 0xAF251AF3B0F025B5) % (
        2**64
    )
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(base)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(z ^ (z >> np.uint64(31)))
