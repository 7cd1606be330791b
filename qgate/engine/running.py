"""One function over many items, in their order, whoever computes them.

Results come in the order of the items, so that what is added up from them is the same for any
number of processes. A process that dies costs the items it was at: each of them is tried once more,
alone, and fails by itself if it takes its process down again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_AHEAD = 3
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Failure:
    """An item whose process ended; what the function raises is raised."""

    reason: str


def outcomes(
    function: Callable[[Item], Result], items: Iterable[Item], jobs: int = 1
) -> Iterator[Result | Failure]:
    """`function` of each item, in the order of the items, by `jobs` processes.

    Items are taken as they are needed, so what waits does not grow with their number. With several
    processes the function and the items are sent to them, so they are importable and plain.
    """
    if jobs <= 1:
        for item in items:
            yield function(item)
        return
    with contextlib.closing(_Pool(jobs)) as pool:
        waiting: deque[tuple[Item, Future[Result]]] = deque()
        for item in items:
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) >= _AHEAD * jobs:
                done = _next(pool, function, waiting)
                yield done
        while waiting:
            done = _next(pool, function, waiting)
            yield done


class _Pool:
    """Processes that are started again when one of them has died."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool = self._new(jobs)

    def _new(self, jobs: int) -> ProcessPoolExecutor:
        # Forked children would inherit torch's threads in the middle of their work.
        return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))

    def submit(self, function: Callable[[Item], Result], item: Item) -> Future[Result]:
        with _one_thread_each():
            try:
                return self._pool.submit(function, item)
            except BrokenProcessPool:
                self._pool.shutdown(wait=False, cancel_futures=True)
                self._pool = self._new(self._jobs)
                return self._pool.submit(function, item)

    def alone(self, function: Callable[[Item], Result], item: Item) -> Result:
        with _one_thread_each(), self._new(1) as pool:
            return pool.submit(function, item).result()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


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


def _next(
    pool: _Pool,
    function: Callable[[Item], Result],
    waiting: deque[tuple[Item, Future[Result]]],
) -> Result | Failure:
    item, future = waiting.popleft()
    try:
        return future.result()
    except BrokenProcessPool:
        pass
    try:
        return pool.alone(function, item)
    except BrokenProcessPool:
        return Failure("its process ended twice: killed, or out of memory")
