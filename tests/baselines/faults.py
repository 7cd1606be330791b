"""Children that die, and disks that fill up, at a chosen step of an update.

A step is one call that changes something on disk. Every one is reached by counting.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

STEPS = ("open", "write", "fsync", "replace", "unlink", "mkdir", "ftruncate", "close")


@contextlib.contextmanager
def watching(react: Callable[[str, tuple[Any, ...], Callable[..., Any]], Any]) -> Iterator[None]:
    """Let `react` stand in for each step; it gets the real call to make or not to make."""
    real = {name: getattr(os, name) for name in STEPS}

    def standing_in(name: str) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            is_read = name == "open" and len(given) > 1 and given[1] & os.O_NONBLOCK
            if is_read:  # as files of others are opened: nothing is written
                return real[name](*given, **more)
            return react(name, given, lambda: real[name](*given, **more))

        return call

    for name in STEPS:
        setattr(os, name, standing_in(name))
    try:
        yield
    finally:
        for name, call in real.items():
            setattr(os, name, call)


def started(work: Callable[[], object]) -> int:
    """A process that does the work and is gone, without what pytest does at an end."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def ended(child: int) -> int:
    """The exit status of a process: 0 done, 1 an exception, below that the signal it died of."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(work: Callable[[], object]) -> int:
    """The exit status of a process that did the work."""
    return ended(started(work))


def dying_at(step: int, work: Callable[[], object], *, half: bool = False) -> int:
    """The work in a child that is gone before its step of this number, or in the middle of it."""
    count = 0

    def react(name: str, given: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        nonlocal count
        count += 1
        if count == step:
            if half and name == "write":
                real_write(given[0], bytes(given[1])[: len(given[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return call()

    def watched() -> None:
        with watching(react):
            work()

    real_write = os.write
    return in_child(watched)


@contextlib.contextmanager
def interrupted_after(step: int) -> Iterator[list[str]]:
    """Control-C right after a step; gives the names of the steps made."""
    step_names: list[str] = []

    def react(name: str, _: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        step_names.append(name)
        try:
            return call()
        finally:
            if len(step_names) == step:
                raise KeyboardInterrupt

    with watching(react):
        yield step_names


@contextlib.contextmanager
def failing_from(step: int, *, once: bool, code: int = errno.ENOSPC) -> Iterator[list[str]]:
    """From a step on (or only there) what needs room fails; gives the names of the steps made."""
    step_names: list[str] = []

    def react(name: str, given: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        step_names.append(name)
        due = len(step_names) == step if once else len(step_names) >= step
        creates = name != "open" or (len(given) > 1 and given[1] & os.O_CREAT)
        if due and creates and name not in ("unlink", "close"):
            raise OSError(code, os.strerror(code))
        return call()

    with watching(react):
        yield step_names
