"""Snapshots of tensors, taken when they pass a site, and the thread that writes them.

A later write into a tensor does not change its snapshot. A tensor that passes several sites without
a write in between is read and copied once.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.collecting.device import PendingCopy, start_on_cuda
from qgate.collecting.settings import DTYPES, CollectSettings
from qgate.collecting.values import ValueReading, can_be_read, read
from qgate.dumps.record import Record
from qgate.hooks.tensor_cache import TensorCache

Work = Callable[[], None]


class WriterThread:
    """A thread that does work in order, and makes the model wait when it cannot follow.

    At most `limit` bytes of work are pending. After an error further work is skipped and counted:
    training goes on, and the summary reports it.
    """

    def __init__(self, limit: int, on_error: Callable[[BaseException], None]) -> None:
        self.limit = limit
        self.pending_bytes = self.peak_bytes = self.skipped = 0
        self.error: BaseException | None = None
        self._on_error = on_error
        self._waiting: collections.deque[tuple[Work, int]] = collections.deque()
        self._changed = threading.Condition()
        self._last: Work | None = None
        self._thread = threading.Thread(target=self._run, name="qgate-collect", daemon=True)
        self._thread.start()

    def reserve(self, size: int) -> None:
        """Wait until there is room for so many bytes; larger work than the limit goes alone."""
        with self._changed:
            while (
                self.pending_bytes and self.pending_bytes + size > self.limit and self.error is None
            ):
                self._changed.wait()
            self.pending_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.pending_bytes)

    def put(self, work: Work, size: int) -> None:
        """Queue work, whose reserved `size` is released afterwards."""
        with self._changed:
            self._waiting.append((work, size))
            self._changed.notify_all()

    def release(self, size: int) -> None:
        with self._changed:
            self.pending_bytes -= size
            self._changed.notify_all()

    def end(self, last: Work) -> None:
        """Do `last` after all queued work, also after an error."""
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and self._last is None:
                    self._changed.wait()
                if not self._waiting:
                    break
                work, size = self._waiting.popleft()
            try:
                if self.error is None:
                    work()
                else:
                    self.skipped += 1
            except BaseException as error:
                self.skipped += 1
                self._fail(error)
            finally:
                del work
                self.release(size)
        try:
            if self._last is not None:
                self._last()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()
        self._on_error(error)


@dataclass(eq=False)
class Snapshot:
    """A tensor at the moment it passed a site.

    reading   figures read from it; None for dtypes without readable numbers
    values    its copy on the host, where values are kept
    pending   a copy from a device that is under way
    size      bytes in use until it is written
    stored    its record once it is written, when its memory is free again
    """

    shape: tuple[int, ...]
    dtype: str
    reading: ValueReading | None = None
    values: Tensor | None = None
    pending: PendingCopy | None = None
    size: int = 0
    buffer: Tensor | None = None
    stored: Record | None = None

    def wait(self) -> None:
        """Wait until the device has copied everything."""
        if self.pending is not None:
            self.reading, self.values = self.pending.finish()
            self.pending = None


class BufferPool:
    """Host memory for reuse, as fresh pages cost more than the copy into them.

    Used and free buffers are at most `most` bytes together, or only used ones beyond that.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: dict[int, list[Tensor]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def acquire(self, size: int) -> Tensor:
        with self._lock:
            if self._free.get(size):
                return self._free[size].pop()
            self._size += size
            for other in sorted(self._free, reverse=True):
                while self._free[other] and self._size > self._most:
                    self._free[other].pop()
                    self._size -= other
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def release(self, buffer: Tensor) -> None:
        with self._lock:
            if self._size <= self._most:
                self._free.setdefault(buffer.numel(), []).append(buffer)
            else:
                self._size -= buffer.numel()


class Snapshots:
    """Takes snapshots as settings ask for, once `thread` has room in memory for them."""

    def __init__(self, thread: WriterThread, settings: CollectSettings) -> None:
        self._thread = thread
        self._values, name = settings.level == "tensors", DTYPES.get(settings.dtype)
        self._dtype: torch.dtype | None = None if name is None else getattr(torch, name)
        self._most, self._seed = settings.most, settings.seed
        self.buffers = BufferPool(thread.limit)
        self._cache: TensorCache[Snapshot] = TensorCache()

    def of(self, x: Tensor) -> tuple[Snapshot, bool]:
        """Return the snapshot of a tensor, and whether it is new."""
        return self._cache.get(x, lambda tensor: self._take(tensor.detach()))

    def clear(self) -> None:
        """Drop all snapshots, as a new iteration may have written to tensors without a trace."""
        self._cache.clear()

    def _take(self, x: Tensor) -> Snapshot:
        snapshot = Snapshot(tuple(x.shape), str(x.dtype).removeprefix("torch."))
        target = self._dtype if self._dtype is not None and x.is_floating_point() else x.dtype
        sampled = x.numel() if self._most is None else min(self._most, x.numel())
        snapshot.size = sampled * 8 + (x.numel() * target.itemsize if self._values else 0)
        self._thread.reserve(snapshot.size)
        try:
            self._fill(snapshot, x, target)
        except BaseException:
            self._thread.release(snapshot.size)
            raise
        return snapshot

    def _fill(self, snapshot: Snapshot, x: Tensor, target: torch.dtype) -> None:
        if x.layout != torch.strided:
            raise TypeError(f"a tensor of layout {str(x.layout)[6:]} is not kept")
        if x.is_cuda and can_be_read(x):
            snapshot.pending = start_on_cuda(x, target if self._values else None, self._seed)
            return
        x = x.cpu()
        if self._values:
            snapshot.buffer = self.buffers.acquire(x.numel() * target.itemsize)
            snapshot.values = snapshot.buffer.view(target).view(x.shape)
        if can_be_read(x):
            same = snapshot.values if target == x.dtype else None
            snapshot.reading = read(x, self._most, self._seed, same)
        if snapshot.values is not None and (snapshot.reading is None or target != x.dtype):
            snapshot.values.copy_(x)
