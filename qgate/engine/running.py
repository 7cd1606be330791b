"""Run one function over many items, with results in the order of the items.

The order makes sums of results equal for any engine and number of processes. An item whose process
dies is tried again, alone, and fails by itself if its process dies again.
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
# Number of results that each node of the tree merges.
_FAN = 8


def map_items(
    function: Callable[..., Result],
    items: Iterable[Item],
    workers: Workers | int = 1,
    *,
    shared: object = None,
) -> Generator[Result | Failure, None, None]:
    """Yield `function(item)`, or `function(item, shared)`, in the order of the items.

    Items are taken as they are needed. Other processes receive the function and the items, which
    are importable and plain, and the shared value once each.
    """
    backend = backend_of(workers_of(workers), function, _shared_values(shared))
    with contextlib.closing(backend):
        for handle, failed in _finished(backend, items):
            yield cast(Result, backend.result(handle)) if failed is None else failed


@contextlib.contextmanager
def started(
    function: Callable[[Item], Result], item: Item, workers: Workers
) -> Iterator[Callable[[], Result | Failure]]:
    """Start `function(item)` and yield what waits for its result; an error inside ends it."""
    with contextlib.closing(backend_of(workers, function, [])) as backend:
        handle = backend.start(item)

        def result() -> Result | Failure:
            failed = backend.wait(handle)
            return cast(Result, backend.result(handle)) if failed is None else failed

        yield result


@dataclass
class Reduction(Generic[Result]):
    """The merged result, None without any, and the failed items by position."""

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
) -> Reduction[Result]:
    """Merge `function(item)` of all items into one result, where the engine computes them.

    The tree of merges depends on the order of the items alone: sums of floats have the same bits
    for any engine. `merge` does not change its arguments; `step` gets the number of finished items.
    """
    reduction: Reduction[Result] = Reduction()
    backend = backend_of(workers_of(workers), function, _shared_values(shared))
    with contextlib.closing(backend):
        tree = _Tree(backend, merge)
        for position, (handle, failed) in enumerate(_finished(backend, items)):
            reduction.items += 1
            if failed is None:
                tree.add(handle)
            else:
                reduction.failed[position] = failed
            step(reduction.items)
        root = tree.whole()
        if root is not None:
            reduction.result = backend.result(root)
    return reduction


def _shared_values(shared: object) -> list[object]:
    return [] if shared is None else [shared]


def _finished(backend: Backend, items: Iterable[Any]) -> Iterator[tuple[Any, Failure | None]]:
    """Yield handles of finished items, in the order of the items."""
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
    """A tree that merges eight neighbors, then eight of these, and so on, in order.

    An eager backend merges each result as it comes, so that one per level is kept.
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
        """Merge the remaining nodes: earlier items are in higher levels."""
        partials = [self._fold(level.handles) for level in reversed(self._levels) if level.handles]
        return self._fold(partials) if partials else None


@dataclass
class _Level:
    handles: list[Any]
    count: int
