"""Copies of what flows, made when it flows: what a later layer writes into it is not seen.

The same tensor, not written to since, is read and copied once however many modules it passes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.collecting.device import Pending, start_on_cuda
from qgate.collecting.values import ValueReading, can_be_read, read
from qgate.dumps.records import Record


@dataclass(eq=False)
class Snapshot:
    """A tensor as it was. `stored` is its record once it is written; its memory is free then.

    reading   what was read of it; None where it holds no numbers that can be read
    values    its copy on the host, where values are kept
    pending   what a device is still copying
    size      bytes it holds until it is written
    """

    shape: tuple[int, ...]
    dtype: str
    reading: ValueReading | None = None
    values: Tensor | None = None
    pending: Pending | None = None
    size: int = 0
    buffer: Tensor | None = None
    stored: Record | None = None

    def wait(self) -> None:
        """Until the device has copied everything."""
        if self.pending is not None:
            self.reading, self.values = self.pending.finish()
            self.pending = None


class Buffers:
    """Host memory that is used again: fresh pages cost more than the copy into them.

    What is in use and what is kept for later are at most `most` bytes together, or what is in use.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: dict[int, list[Tensor]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> Tensor:
        with self._lock:
            if self._free.get(size):
                return self._free[size].pop()
            self._size += size
            for other in sorted(self._free, reverse=True):
                while self._free[other] and self._size > self._most:
                    self._free[other].pop()
                    self._size -= other
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def give(self, buffer: Tensor) -> None:
        with self._lock:
            if self._size <= self._most:
                self._free.setdefault(buffer.numel(), []).append(buffer)
            else:
                self._size -= buffer.numel()


class Snapshots:
    """Takes snapshots; `reserve` waits for room in memory before anything is copied, and `release`
    gives it back where the copy fails."""

    def __init__(
        self,
        reserve: Callable[[int], None],
        release: Callable[[int], None],
        *,
        values: bool,
        dtype: torch.dtype | None,
        most: int | None,
        seed: int,
        room: int,
    ) -> None:
        self._reserve, self._release = reserve, release
        self._values, self._dtype = values, dtype
        self._most, self._seed = most, seed
        self.buffers = Buffers(room)
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Snapshot]] = {}

    def of(self, x: Tensor) -> tuple[Snapshot, bool]:
        """The snapshot of a tensor, and whether it is new and has to be written."""
        version = -1 if x.is_inference() else x._version
        if version >= 0 and id(x) in self._known:
            ref, seen, snapshot = self._known[id(x)]
            if ref() is x and seen == version:
                return snapshot, False
        snapshot = self._take(x.detach())
        if version >= 0:
            self._known[id(x)] = (weakref.ref(x), version, snapshot)
        return snapshot, True

    def forget(self) -> None:
        """What was seen; a new iteration may have written to it without a trace."""
        self._known.clear()

    def _take(self, x: Tensor) -> Snapshot:
        made = Snapshot(tuple(x.shape), str(x.dtype).removeprefix("torch."))
        target = self._dtype if self._dtype is not None and x.is_floating_point() else x.dtype
        sampled = x.numel() if self._most is None else min(self._most, x.numel())
        made.size = sampled * 8 + (x.numel() * target.itemsize if self._values else 0)
        self._reserve(made.size)
        try:
            self._fill(made, x, target)
        except BaseException:
            self._release(made.size)
            raise
        return made

    def _fill(self, made: Snapshot, x: Tensor, target: torch.dtype) -> None:
        if x.layout != torch.strided:
            raise TypeError(f"a tensor of layout {str(x.layout)[6:]} is not kept")
        if x.is_cuda and can_be_read(x):
            made.pending = start_on_cuda(x, target if self._values else None, self._seed)
            return
        x = x.cpu()
        if self._values:
            made.buffer = self.buffers.take(x.numel() * target.itemsize)
            made.values = made.buffer.view(target).view(x.shape)
        if can_be_read(x):
            same = made.values if made.values is not None and target == x.dtype else None
            made.reading = read(x, self._most, self._seed, same)
        if made.values is not None and (made.reading is None or target != x.dtype):
            made.values.copy_(x)
