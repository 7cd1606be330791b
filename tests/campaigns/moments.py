"""The steps in which a process changes files below a folder, and what can happen at each of them.

Steps are told by audit events (open for writing, rename, remove, mkdir …), which the interpreter
raises before it acts, whoever called; writes, syncs and truncations by handle have none and are
stood in for. What C code writes on its own has no step: a limit of the system on the size of files
ends a process in the middle of that.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_EVENTS = {
    "open": 0, "os.rename": 1, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0, "os.link": 1,
    "os.symlink": 1, "os.truncate": 0, "os.chmod": 0,
}  # fmt: skip
_HANDLED = ("write", "fsync", "ftruncate")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
React = Callable[[int, str, str], None]


class Steps:
    """Counts the steps of this process below a folder; `react` gets number, name and path."""

    def __init__(self, folder: Path, react: React | None = None) -> None:
        self._folder = str(folder.resolve()) + os.sep
        self._react = react
        self._busy = False
        self.made: list[str] = []

    def install(self) -> None:
        """For the rest of this process."""
        sys.addaudithook(self._heard)
        for name in _HANDLED:
            setattr(os, name, self._standing_in(name, getattr(os, name)))

    def _heard(self, event: str, given: tuple[Any, ...]) -> None:
        position = _EVENTS.get(event)
        if position is None or (event == "open" and not _writes(given)):
            return
        self._step(event, given[position])

    def _standing_in(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(handle: Any, *more: Any) -> Any:
            self._step(name, handle)
            return real(handle, *more)

        return call

    def _step(self, name: str, where: Any) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            path = _path_of(where)
            if path.startswith(self._folder):
                self.made.append(f"{name} {path.removeprefix(self._folder)}")
                if self._react is not None:
                    self._react(len(self.made), name, path)
        finally:
            self._busy = False


def _writes(given: tuple[Any, ...]) -> bool:
    mode, flags = given[1], given[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & _WRITING)


def _path_of(where: Any) -> str:
    try:
        if isinstance(where, int):
            return str(Path(f"/proc/self/fd/{where}").readlink())
        return str(Path.cwd() / os.fsdecode(where))
    except (OSError, TypeError, ValueError):
        return ""


def counting(folder: Path, listed: Path) -> Callable[[], None]:
    """Write every step into a file that grows beside the folder."""

    def fault() -> None:
        handle = os.open(listed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        real = os.write
        Steps(folder, lambda _, name, path: _line(real, handle, f"{name} {path}")).install()

    return fault


def _line(write: Callable[[int, bytes], int], handle: int, text: str) -> None:
    write(handle, text.encode() + b"\n")


def dying_at(folder: Path, step: int) -> Callable[[], None]:
    """Gone, without a word, just before a step."""

    def react(number: int, _: str, __: str) -> None:
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: Steps(folder, react).install()


def dying_at_byte(size: int) -> Callable[[], None]:
    """Gone in the middle of a write: no file may have more bytes than this."""

    def fault() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return fault


def failing_from(folder: Path, step: int, code: int, *, once: bool) -> Callable[[], None]:
    """From a step on, or at it only, what needs room fails with an error of the system."""

    def react(number: int, name: str, path: str) -> None:
        due = number == step if once else number >= step
        if due and name not in ("os.remove", "os.rmdir", "os.truncate", "ftruncate", "os.chmod"):
            raise OSError(code, os.strerror(code), path)

    return lambda: Steps(folder, react).install()


def failing_at(folder: Path, step: int, code: int) -> Callable[[], None]:
    """At a step, whatever it is, the system has an error; the process goes on."""

    def react(number: int, _: str, path: str) -> None:
        if number == step:
            raise OSError(code, os.strerror(code), path)

    return lambda: Steps(folder, react).install()


def limited(size: int) -> Callable[[], None]:
    """Files may not grow beyond a size; writes get an error then, as with a quota."""

    def fault() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return fault


def slow(folder: Path, seconds: float) -> Callable[[], None]:
    """Every step takes its time."""
    return lambda: Steps(folder, lambda _, __, ___: time.sleep(seconds)).install()
