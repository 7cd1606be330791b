"""One case under guard: what a reader may do with a file that somebody else made.

It reads, or it says one `QgateError` (an `OSError` of the system, a warning, a usage error of the
command line are as good). It may not raise anything else, compute longer than five seconds, use much
more memory than the file is large, leave the folder of the case, or run what the file says.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qgate.errors import QgateError

SECONDS = 5.0
_WAITING = 24
ROOM = 96 << 20
"""Bytes that a reader may take beside what the size of its file allows."""
TIMES = 2
HEADROOM = 6 << 30
"""Address space a case may ask for: a safety net, so that a blow-up is an error and no swap."""
_RUNNERS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "ctypes.dlopen",
            "socket.connect", "webbrowser.open")  # fmt: skip


class TooLongError(BaseException):
    """Raised from the alarm, past every `except Exception`."""


@dataclass(frozen=True)
class Outcome:
    """`said` is the error a user would see, empty where the file was read; `wrong` what may not be."""

    said: str = ""
    wrong: str = ""


@dataclass
class _Watched:
    outside: str = ""
    seen: str = ""


_watched: list[_Watched] = []
_hooked: list[bool] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _watched:
        return
    watched = _watched[-1]
    if event in _RUNNERS:
        watched.seen = watched.seen or f"{event} {args!r:.200}"
    elif event == "open" and watched.outside and isinstance(args[0], str | bytes):
        path = os.path.realpath(os.fsdecode(args[0])) if b"\0" not in os.fsencode(args[0]) else ""
        if path.startswith(watched.outside):
            watched.seen = watched.seen or f"opened {path}"


def guarded(
    read: Callable[[], object],
    *,
    size: int,
    outside: Path | None = None,
    canary: Path | None = None,
    allowed: tuple[type[BaseException], ...] = (),
    seconds: float = SECONDS,
    room: int = ROOM,
) -> Outcome:
    """What became of one call; `size` are the bytes of what it reads."""
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked.append(True)
    watched = _Watched("" if outside is None else str(outside.resolve()))
    refusal = wrong = ""
    before = _peak_anew()
    caught: BaseException | None = None
    _watched.append(watched)
    try:
        with _limited(seconds):
            try:
                read()
            except Exception as error:
                caught = error
    except TooLongError as error:
        caught = error
    finally:
        _watched.pop()
    if isinstance(caught, (QgateError, OSError, *allowed)):
        refusal = f"{type(caught).__name__}: {caught}"
    elif isinstance(caught, TooLongError):
        wrong = f"took more than {seconds} s: {_where(caught)}"
    elif isinstance(caught, MemoryError):
        wrong = f"asked for more than all memory: {_where(caught)}"
    elif caught is not None:
        wrong = f"{type(caught).__name__}: {str(caught)[:200]}: {_where(caught)}"
    grown = _peak() - before
    if not wrong and grown > room + TIMES * size:
        wrong = f"took {grown >> 20} MB for {size} bytes"
    if not wrong and watched.seen:
        wrong = watched.seen
    if canary is not None and canary.exists():
        canary.unlink()
        wrong = f"code of the file ran; {wrong}"
    return Outcome(refusal, wrong)


def _where(error: BaseException) -> str:
    """The last places in the house."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f"{Path(f.filename).name}:{f.name}" for f in frames if "qgate" in f.filename]
    own = [frame for frame in inside if not frame.startswith(("guard.py", "targets"))]
    return " < ".join(reversed(own[-3:])) or "outside of the house"


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def ring(signum: int, frame: Any) -> None:  # noqa: ARG001
        raise TooLongError

    # Seconds of the processor, whatever else runs; a reader that only waits is ended later.
    timers = {
        signal.SIGPROF: (signal.ITIMER_PROF, seconds),
        signal.SIGALRM: (signal.ITIMER_REAL, _WAITING * seconds),
    }
    before = {number: signal.signal(number, ring) for number in timers}
    space = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, space[1]))
    for timer, limit in timers.values():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for number, (timer, _limit) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
        resource.setrlimit(resource.RLIMIT_AS, space)


def _peak_anew() -> int:
    """Forget the largest memory this process had; what it has now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("this system does not say how much memory a process has had")
