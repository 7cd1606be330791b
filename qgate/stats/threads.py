"""Work on chunks by threads, where most of it runs without Python's lock."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from qgate.stats.bits import serial

T = TypeVar("T")
R = TypeVar("R")


def in_order(
    function: Callable[[T], R], items: Iterable[T], threads: int = 0, ahead: int = 0
) -> Iterator[R]:
    """Yield results in the order of the items, of which a few are worked on ahead.

    There are as many threads as torch uses, unless `threads` says otherwise, and torch has one in
    each.
    """
    threads = threads or torch.get_num_threads()
    remaining = iter(items)
    first = list(itertools.islice(remaining, 2))
    if len(first) < 2:
        yield from map(function, first)
        return
    waiting: deque[Future[R]] = deque()
    with serial(), ThreadPoolExecutor(threads, thread_name_prefix="qgate-chunks") as pool:
        for item in itertools.chain(first, remaining):
            waiting.append(pool.submit(function, item))
            if len(waiting) >= (ahead or threads + 1):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
