"""Let pytest-xdist start its workers as forks of a process that has loaded torch already."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import pytest
from execnet import gateway_io


class ForkedWorker:
    """A process that waits for what execnet sends to a new Python, with the verbs of a Popen."""

    def __init__(self, earlier: Sequence[ForkedWorker]) -> None:
        reading, to_worker = os.pipe()
        from_worker, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            for handle in (to_worker, from_worker):
                os.close(handle)
            for worker in earlier:  # whose end of input it would keep from them
                os.close(worker.stdin.fileno())
            _serve(reading, writing)
        os.close(reading)
        os.close(writing)
        self.stdin, self.stdout = os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb")

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _serve(reading: int, writing: int) -> NoReturn:
    """Do what `python -c "import sys;exec(eval(sys.stdin.readline()))"` does."""
    status = 1
    try:
        os.dup2(reading, 0)
        os.dup2(writing, 1)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        line = sys.stdin.readline()
        if line:
            exec(eval(line), {"__name__": "__main__"})
        status = 0
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


@contextlib.contextmanager
def forked_workers(options: Sequence[str]) -> Iterator[None]:
    """Fork as many as `-n N` asks for; one that takes the place of a crashed one starts cold."""
    count = int(options[options.index("-n") + 1]) if "-n" in options else 0
    waiting: list[ForkedWorker] = []
    for _ in range(count):
        waiting.append(ForkedWorker(waiting))
    start = gateway_io.create_io

    def create_io(spec: Any, execmodel: Any) -> Any:
        if not waiting:
            return start(spec, execmodel)
        master = object.__new__(gateway_io.Popen2IOMaster)
        master.popen = worker = waiting.pop(0)
        gateway_io.Popen2IO.__init__(master, worker.stdin, worker.stdout, execmodel=execmodel)
        return master

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway_io, "create_io", create_io)
        try:
            yield
        finally:
            for worker in waiting:
                worker.stdin.close()
                worker.wait()
