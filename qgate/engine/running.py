"""One function over many items, in their order, whoever computes them.

Results come in the order of the items, so that what is added up from them is the same for any
engine and any number of processes. An item whose process dies is tried again, alone, and fails by
itself if it takes that one down too.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from qgate.engine._backends import Backend, backend_of
from qgate.engine.workers import Failure, Workers, workers_of

Item = TypeVar("Item")
Result = TypeVar("Result")
# How many results are merged into one, at each level of the tree.
_FAN = 8


def outcomes(
    function: Callable[..., Result],
    items: Iterable[Item],
    workers: Workers | int = 1,
    *,
    shared: object = None,
) -> Generator[Result | Failure, None, None]:
    """`function` of each item, in the order of the items; `shared`, where given, comes after it.

    Items are taken as they are needed, so what waits does not grow with their number. With several
    processes the function and the items are sent to them, so they are importable and plain; what is
    shared is sent once to each.
    """
    backend = backend_of(workers_of(workers), function, _given(shared))
    with contextlib.closing(backend):
        for handle, failed in _waited(backend, items):
            yield cast(Result, backend.result(handle)) if failed is None else failed


@dataclass
class Merged(Generic[Result]):
    """All results in one, None where there is none; and the items that failed, by their place."""

    result: Result | None = None
    items: int = 0
    failed: dict[int, Failure] = field(default_factory=dict)


def merged(
    function: Callable[..., Result],
    merge: Callable[[Result, Result], Result],
    items: Iterable[Item],
    workers: Workers | int = 1,
    *,
    shared: object = None,
    step: Callable[[int], None] = lambda _done: None,
) -> Merged[Result]:
    """`function` of each item, merged into one result where they were made.

    The tree of merges depends on the order of the items alone: sums of floats have the same bits
    for any engine. `merge` leaves its arguments as they are; `step` is told how many items are
    done.
    """
    found: Merged[Result] = Merged()
    backend = backend_of(workers_of(workers), function, _given(shared))
    with contextlib.closing(backend):
        tree = _Tree(backend, merge)
        for place, (handle, failed) in enumerate(_waited(backend, items)):
            found.items += 1
            if failed is None:
                tree.add(handle)
            else:
                found.failed[place] = failed
            step(found.items)
        whole = tree.whole()
        if whole is not None:
            found.result = backend.result(whole)
    return found


def _given(shared: object) -> list[object]:
    return [] if shared is None else [shared]


def _waited(backend: Backend, items: Iterable[Any]) -> Iterator[tuple[Any, Failure | None]]:
    """Handles of items that are done, in the order of the items."""
    waiting: deque[Any] = deque()
    for item in items:
        waiting.append(backend.start(item))
        if len(waiting) >= backend.ahead:
            handle = waiting.popleft()
            yield handle, backend.wait(handle)
    while waiting:
        handle = waiting.popleft()
        yield handle, backend.wait(handle)


class _Tree:
    """Merges of eight neighbors, of eight of these, and so on; in the end what is left, in order.

    Where results are in this process each is merged as it comes, so that one per level is kept.
    """

    def __init__(self, backend: Backend, merge: Callable[[Any, Any], Any]) -> None:
        self._backend, self._merge = backend, merge
        self._levels: list[_Level] = []

    def add(self, handle: Any) -> None:
        for level in self._levels:
            self._put(level, handle)
            if level.count < _FAN:
                return
            handle = self._fold(level.handles)
            level.handles, level.count = [], 0
        self._levels.append(_Level([handle], 1))

    def _put(self, level: _Level, handle: Any) -> None:
        level.handles.append(handle)
        level.count += 1
        if self._backend.eager:
            level.handles = [self._fold(level.handles)]

    def _fold(self, handles: list[Any]) -> Any:
        return handles[0] if len(handles) == 1 else self._backend.fold(self._merge, handles)

    def whole(self) -> Any:
        """Earlier items are higher up: from the top down, and in each level, they are in order."""
        left = [self._fold(level.handles) for level in reversed(self._levels) if level.handles]
        return self._fold(left) if left else None


@dataclass
class _Level:
    handles: list[Any]
    count: int
