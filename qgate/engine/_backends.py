"""What each engine can do: start a piece of work, wait for it, and merge what came of several."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

from qgate.engine.workers import Failure, Workers

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SHARED = "shared"
_ENDED = "its process ended twice: killed, or out of memory"
# What every process was given once: the same for all items.
_shared: list[Any] = []


class Backend(Protocol):
    """`ahead` is how many items may be started before the first is waited for.

    `eager` if results are in this process, so that merging them at once keeps fewer.
    """

    ahead: int
    eager: bool

    def start(self, item: Any) -> Any:
        """A handle of the function's work on an item."""

    def wait(self, handle: Any) -> Failure | None:
        """Until it is done; why it failed where its process did. What it raised is raised."""

    def fold(self, merge: Callable[[Any, Any], Any], handles: Sequence[Any]) -> Any:
        """A handle of their results merged, from the first to the last."""

    def result(self, handle: Any) -> Any:
        """What came of it, here."""

    def close(self) -> None:
        """Give up what is not done."""


def backend_of(workers: Workers, function: Callable[..., Any], shared: Sequence[Any]) -> Backend:
    """`shared` holds at most one value, which the function gets after the item."""
    if not workers.is_local:
        from qgate.engine._ray import RayBackend

        return RayBackend(workers, function, shared)
    if workers.is_here:
        return _Here(function, shared)
    return _Processes(workers.jobs or 1, function, shared)


class _Folding:
    """Merges where the results already are: in this process."""

    eager = True

    def fold(self, merge: Callable[[Any, Any], Any], handles: Sequence[Any]) -> Any:
        total = self.result(handles[0])
        for handle in handles[1:]:
            total = merge(total, self.result(handle))
        return _Done(total)

    def result(self, handle: Any) -> Any:
        return handle.value


@dataclass
class _Done:
    value: Any


class _Here(_Folding):
    ahead = 1

    def __init__(self, function: Callable[..., Any], shared: Sequence[Any]) -> None:
        self._function, self._shared = function, shared

    def start(self, item: Any) -> _Done:
        return _Done(self._function(item, *self._shared))

    def wait(self, handle: Any) -> None:  # noqa: ARG002
        return None

    def close(self) -> None:
        pass


@dataclass
class _Running:
    """An item, its future, and in the end its value alone: what is merged is not kept twice."""

    item: Any
    future: Future[Any] | None
    value: Any = None


class _Processes(_Folding):
    """Processes of this machine, started again when one has died.

    A process that dies costs the items it was at: each of them is tried once more, alone.
    """

    def __init__(self, jobs: int, function: Callable[..., Any], shared: Sequence[Any]) -> None:
        self.ahead = 3 * jobs
        self._jobs, self._function = jobs, function
        self._home = tempfile.TemporaryDirectory(prefix="qgate-")
        _keep(shared, Path(self._home.name))
        self._pool = self._new(jobs)

    def _new(self, jobs: int) -> ProcessPoolExecutor:
        # Forked children would inherit torch's threads in the middle of their work.
        return ProcessPoolExecutor(
            jobs,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_take,
            initargs=(self._home.name,),
        )

    def start(self, item: Any) -> _Running:
        with _one_thread_each():
            try:
                return _Running(item, self._pool.submit(_work, self._function, item))
            except BrokenProcessPool:
                self._pool.shutdown(wait=False, cancel_futures=True)
                self._pool = self._new(self._jobs)
                return _Running(item, self._pool.submit(_work, self._function, item))

    def wait(self, handle: _Running) -> Failure | None:
        if handle.future is None:
            return None
        try:
            handle.value = handle.future.result()
        except BrokenProcessPool:
            try:
                with _one_thread_each(), self._new(1) as pool:
                    handle.value = pool.submit(_work, self._function, handle.item).result()
            except BrokenProcessPool:
                return Failure(_ENDED)
        handle.future = None
        return None

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._home.cleanup()


def _keep(shared: Sequence[Any], home: Path) -> None:
    """In a file of this process alone: what is large must not go through the pipe of a new process.

    One that ends before it has read its arguments, as under a script without a main guard, would
    leave this one writing forever.
    """
    if shared:
        (home / _SHARED).write_bytes(ForkingPickler.dumps(list(shared)))


def _take(home: str) -> None:
    """What a new process does first."""
    threading.Thread(target=_end_with_parent, args=(home,), daemon=True).start()
    path = Path(home) / _SHARED
    _shared[:] = ForkingPickler.loads(path.read_bytes()) if path.exists() else []


def _end_with_parent(home: str) -> None:
    """A parent that was killed ends no process that waits for its work, and removes no `home`."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(home, ignore_errors=True)
        os._exit(1)


def _work(function: Callable[..., Any], item: Any) -> Any:
    return function(item, *_shared)


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that are started here compute in one thread, unless somebody said otherwise.

    Those of BLAS would spin for work on the cores that the other processes need: three times the
    time, with two processes on two cores.
    """
    added = [name for name in _THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
