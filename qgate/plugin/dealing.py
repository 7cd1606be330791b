"""Which worker of pytest-xdist runs which tests: the gates of a mode go to one, together.

What a mode costs is measured once per process. pytest-xdist deals half of all tests first, in long
pieces of the list: one worker then has nearly all modes, and one of them is cut in two. The process
that deals collects nothing, so that workers write down which of their tests belong together.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling
from xdist.workermanage import WorkerController

from qgate.storage.files import scratch_folder

_FOLDER: pytest.StashKey[Path] = pytest.StashKey()
_WORKER_INPUT = "qgate_groups"
_ALONE = -1


def tell_worker(config: pytest.Config, workerinput: dict[str, object]) -> None:
    """Tell a worker where it writes down its groups."""
    if _FOLDER not in config.stash:
        holding = contextlib.ExitStack()
        config.stash[_FOLDER] = holding.enter_context(scratch_folder())
        config.add_cleanup(holding.close)
    workerinput[_WORKER_INPUT] = str(config.stash[_FOLDER] / f"{workerinput['workerid']}.json")


def write_groups(config: pytest.Config, groups: Sequence[Hashable]) -> None:
    """Write a number for each test of a worker: the same one for tests that belong together."""
    sizes, numbers = Counter(groups), dict[Hashable, int]()
    listed = [
        numbers.setdefault(group, len(numbers)) if sizes[group] > 1 else _ALONE for group in groups
    ]
    path = getattr(config, "workerinput", {}).get(_WORKER_INPUT)
    # A worker on another host has no such folder.
    if path is not None and Path(path).parent.is_dir():
        Path(path).write_text(json.dumps(listed), encoding="ascii", newline="")


def scheduling_of(config: pytest.Config, log: Any) -> LoadScheduling | None:
    """Return what deals tests in place of `--dist load`; None where another way was asked for."""
    is_usual = config.getvalue("dist") == "load" and config.getoption("maxschedchunk") is None
    folder = config.stash.get(_FOLDER, None)
    return GroupScheduling(config, log, folder) if is_usual and folder is not None else None


class GroupScheduling(LoadScheduling):  # type: ignore[misc]
    """Deals whole groups, one at a time, and other tests in pieces of what is left."""

    def __init__(self, config: pytest.Config, log: Any, folder: Path) -> None:
        super().__init__(config, log)
        self._folder = folder
        self._groups: list[int] = []

    def schedule(self) -> None:
        if self.collection is None:
            self._groups = self._written()
        super().schedule()

    def check_schedule(self, node: WorkerController, duration: float = 0) -> None:
        """Send a worker more before it waits: it runs a test once it has the next one."""
        if not self._groups:
            super().check_schedule(node, duration)
        elif not node.shutting_down and not self.pending:
            node.shutdown()
        elif not node.shutting_down:
            self._send_tests(node, 1)

    def _send_tests(self, node: WorkerController, num: int) -> None:
        if not self._groups:
            super()._send_tests(node, num)
            return
        while self.pending and len(self.node2pending[node]) < 2:
            super()._send_tests(node, self._size())

    def _size(self) -> int:
        """Return how many of the tests that are left are sent at once."""
        first = self._groups[self.pending[0]]
        size = sum(1 for _ in takewhile(lambda i: self._groups[i] == first, self.pending))
        piece = max(2, len(self.pending) // len(self.node2pending) // 4)
        return min(size, piece) if first == _ALONE else size

    def _written(self) -> list[int]:
        """Return the groups that a worker wrote; none where no tests belong together."""
        for node, collected in self.node2collection.items():
            try:
                text = (self._folder / f"{node.gateway.id}.json").read_text(encoding="ascii")
            except OSError:
                continue
            groups: list[int] = json.loads(text)
            if len(groups) == len(collected) and max(groups, default=_ALONE) > _ALONE:
                return groups
        return []
