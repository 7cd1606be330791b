"""Engines of this machine: start work on an item, wait for it, and merge results."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
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
from qgate.storage.files import scratch_folder
from qgate.storage.removing import remove_own_folder
from qgate.text.printing import print_line

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SHARED = "shared"
_ENDS = {signal.SIGINT, signal.SIGTERM}
_PATIENCE_S = 10.0
_HAS_MASKS = hasattr(signal, "pthread_sigmask")
_ENDED = "its process ended twice: killed, or out of memory"
_REPEATED = (
    "a process of --jobs ended: killed, or out of memory. What it computed was computed again, and "
    "nothing is missing; use fewer jobs if memory is short."
)
# The value that every process gets once, the same for all items.
_shared: list[Any] = []


@dataclass
class _Process:
    """A process of an engine, which a signal asked to end, and whether it computes an item."""

    working: bool = False
    signal: int | None = None


_process = _Process()


class Backend(Protocol):
    """An engine that computes items.

    ahead  number of items to start before waiting for the first
    eager  results are in this process, so that merging them at once keeps fewer
    """

    ahead: int
    eager: bool

    def start(self, item: Any) -> Any:
        """Start the function on an item, and return a handle."""

    def wait(self, handle: Any) -> Failure | None:
        """Wait for an item; return a Failure if its process ended, and raise what it raised."""

    def fold(self, merge: Callable[[Any, Any], Any], handles: Sequence[Any]) -> Any:
        """Merge results from the first to the last, and return a handle."""

    def result(self, handle: Any) -> Any:
        """Return a result in this process."""

    def close(self) -> None:
        """Cancel unfinished items."""


def backend_of(workers: Workers, function: Callable[..., Any], shared: Sequence[Any]) -> Backend:
    """Return the engine of `workers`; `shared` has at most one value, passed after the item."""
    if not workers.is_local:
        from qgate.engine._ray import RayBackend

        return RayBackend(workers, function, shared)
    if workers.is_here:
        return _ThisProcess(function, shared)
    return _Processes(workers.jobs or 1, function, shared)


@dataclass
class _Handle:
    """An item with its future, which its value replaces when it is done."""

    value: Any = None
    item: Any = None
    future: Future[Any] | None = None


class _LocalFold:
    """Merges results in this process."""

    eager = True

    def fold(self, merge: Callable[[Any, Any], Any], handles: Sequence[Any]) -> Any:
        total = self.result(handles[0])
        for handle in handles[1:]:
            total = merge(total, self.result(handle))
        return _Handle(total)

    def result(self, handle: Any) -> Any:
        return handle.value


class _ThisProcess(_LocalFold):
    ahead = 1

    def __init__(self, function: Callable[..., Any], shared: Sequence[Any]) -> None:
        self._function, self._shared = function, shared

    def start(self, item: Any) -> _Handle:
        return _Handle(self._function(item, *self._shared))

    def wait(self, handle: Any) -> None:  # noqa: ARG002
        return None

    def close(self) -> None:
        pass


class _Processes(_LocalFold):
    """Processes of this machine, started again when one has died.

    Items of a process that died are tried once more, each alone.
    """

    def __init__(self, jobs: int, function: Callable[..., Any], shared: Sequence[Any]) -> None:
        self.ahead = 3 * jobs
        self._jobs, self._function = jobs, function
        self._end = contextlib.ExitStack()
        self._home = self._end.enter_context(scratch_folder())
        _write_shared(shared, self._home)
        self._pool = self._new(jobs)

    def _new(self, jobs: int) -> ProcessPoolExecutor:
        # Forked children would inherit torch's threads in the middle of their work.
        return ProcessPoolExecutor(
            jobs,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_process,
            initargs=(str(self._home),),
        )

    def start(self, item: Any) -> _Handle:
        with _one_thread_each():
            try:
                return _Handle(None, item, self._pool.submit(_work, self._function, item))
            except BrokenProcessPool:
                self._pool.shutdown(wait=False, cancel_futures=True)
                self._pool = self._new(self._jobs)
                return _Handle(None, item, self._pool.submit(_work, self._function, item))

    def wait(self, handle: _Handle) -> Failure | None:
        if handle.future is None:
            return None
        try:
            handle.value = handle.future.result()
        except BrokenProcessPool:
            try:
                handle.value = self._compute_alone(handle.item)
            except BrokenProcessPool:
                return Failure(_ENDED)
            print_line(_REPEATED, file=sys.stderr)
        handle.future = None
        return None

    def _compute_alone(self, item: Any) -> Any:
        """Compute an item in a process of its own."""
        pool, is_done = self._new(1), False
        try:
            with _one_thread_each():
                future = pool.submit(_work, self._function, item)
            value = future.result()
            is_done = True
        finally:
            _close(pool, at_once=not is_done)
        return value

    def close(self) -> None:
        with self._end:
            _close(self._pool, at_once=sys.exc_info()[0] is not None)


def _close(pool: ProcessPoolExecutor, *, at_once: bool) -> None:
    """Wait for the processes of a pool; end them if nobody waits for what they compute."""
    processes = list((pool._processes or {}).values()) if at_once else []

    def kill() -> None:
        for process in processes:
            process.kill()

    for process in processes:
        process.terminate()
    timer = threading.Timer(_PATIENCE_S, kill)  # a call into C hears no signal before it returns
    timer.daemon = True
    timer.start()
    try:
        pool.shutdown(wait=True, cancel_futures=True)
    finally:
        timer.cancel()


def _write_shared(shared: Sequence[Any], home: Path) -> None:
    """Write the shared value to a file, not into the pipe of a new process.

    A process that ends before it has read its arguments, as under a script without a main guard,
    would leave this one writing forever.
    """
    if shared:
        (home / _SHARED).write_bytes(ForkingPickler.dumps(list(shared)))


def _start_process(home: str) -> None:
    """Prepare a new process: watch its parent, and load the shared value.

    Its temporary files are in the folder of its parent, which removes them.
    """
    for number in _ENDS:
        signal.signal(number, _leave)
    os.environ["TMPDIR"] = tempfile.tempdir = home
    threading.Thread(target=_end_with_parent, args=(home,), daemon=True).start()
    path = Path(home) / _SHARED
    _shared[:] = ForkingPickler.loads(path.read_bytes()) if path.exists() else []


def _end_with_parent(home: str) -> None:
    """End this process with its parent, which cannot do so after a kill, and remove `home`."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        remove_own_folder(Path(home))
        os._exit(1)


def _leave(number: int, _frame: object) -> None:
    """End an item without a word; the parent says what happened.

    Between two items this process waits for the next in a pipe that it shares with others, and
    would leave half an item to them if it ended there.
    """
    _process.signal = number
    if _process.working:
        raise SystemExit(128 + number)


def _work(function: Callable[..., Any], item: Any) -> Any:
    if _HAS_MASKS:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
    if _process.signal is not None:
        os._exit(128 + _process.signal)
    try:
        _process.working = True
        return function(item, *_shared)
    finally:
        _process.working = False


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let new processes compute in one thread, unless the environment says otherwise.

    BLAS threads would spin on cores that the other processes need: two processes on two cores took
    three times as long.
    """
    added = [name for name in _THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    # Ctrl-C reaches new processes with their first item, and no import of theirs.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS) if _HAS_MASKS else set()
    try:
        yield
    finally:
        if _HAS_MASKS:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for name in added:
            os.environ.pop(name, None)
