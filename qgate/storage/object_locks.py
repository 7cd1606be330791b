"""One writer at a time in a store: an object that only one process can create.

No system lets go of it when its process is killed, so that a lock left behind is told with its
holder and its age, and removed by a verb. A writer whose lock was removed finds that out before
its update counts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from qgate.errors import QgateError

_STALE_S = 900.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_TIME = "%Y-%m-%d %H:%M:%S"
_BUSY = "ConditionalRequestConflict"


class ObjectLock:
    """`what` says what it guards, as `the baselines in 'b' are`; `remedy` how it is removed.

    `files` is what cannot be written where a store keeps no two writers apart: `baselines`.
    """

    def __init__(self, fs: Any, path: str, what: str, remedy: str, files: str) -> None:
        self._fs, self._path, self._what, self._remedy = fs, path, what, remedy
        self._files = files
        self._text = b""

    @contextlib.contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        self._acquire(timeout_s)
        try:
            check_exclusive(self._fs, self._path, self._text, self._files)
            yield
        finally:
            with contextlib.suppress(Exception):
                if self.read() == self._text:
                    self._fs.rm_file(self._path)

    def check(self) -> None:
        """See that nobody has removed the lock meanwhile."""
        if self.read() != self._text:
            raise QgateError(
                f"{self._what} changed by somebody else: the lock of this process was removed, so "
                "its update was not written. Run this again."
            )

    def read(self) -> bytes | None:
        """Read who holds the lock, as it was written; None if nobody does."""
        try:
            return bytes(self._fs.cat_file(self._path))
        except (FileNotFoundError, KeyError):
            return None

    def remove(self) -> str:
        """Remove the lock, whoever holds it; an empty text where there was none."""
        found = self.read()
        if found is None:
            return ""
        self._fs.rm_file(self._path)
        return _told(found)

    def _acquire(self, timeout_s: float) -> None:
        since = datetime.now(UTC).strftime(_TIME)
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        self._text = f"{holder}, {since}, {secrets.token_hex(8)}".encode()
        end, pause = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while not self._created():
            found = self.read()
            stale = found is not None and _age_s(found) > _STALE_S
            if found is not None and (stale or time.monotonic() >= end):
                waited = "" if stale else f", and not free within {timeout_s:g} s"
                raise QgateError(
                    f"{self._what} being updated by {_told(found)}{waited}. Run this again when it "
                    f"is done. If that process is gone, remove its lock: {self._remedy}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _created(self) -> bool:
        """Create the lock, or tell that it is there; an answer may have been lost on its way."""
        try:
            created_anew(self._fs, self._path, self._text, self._files)
        except FileExistsError:
            return self.read() == self._text
        except OSError as error:
            if _BUSY in f"{error!r} {error.__cause__!r}":
                return False
            raise
        return True


def created_anew(fs: Any, path: str, data: bytes, files: str) -> None:
    """Write an object that is not there yet, or raise a FileExistsError."""
    try:
        fs.pipe_file(path, data, mode="create")
    except (TypeError, ValueError, NotImplementedError):
        raise _cannot_exclude(fs, files) from None
    except OSError as error:
        if "(NotImplemented)" in repr(error.__cause__):
            raise _cannot_exclude(fs, files) from None
        raise


def check_exclusive(fs: Any, path: str, data: bytes, files: str) -> None:
    """See that a store refuses to create the object that was just created."""
    try:
        created_anew(fs, path, data, files)
    except FileExistsError:
        return
    raise _cannot_exclude(fs, files)


def _cannot_exclude(fs: Any, files: str) -> QgateError:
    scheme = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    return QgateError(
        f"this {scheme}:// store does not say whether an object is new (a write on condition), so "
        f"two updates at once could not be kept apart: {files} are read from it and not written. "
        "Update them in a folder, and copy that there."
    )


def _told(text: bytes) -> str:
    shown, age = _fields(text)
    return shown if age is None else f"{shown} UTC ({_shown_age(age)} ago)"


def _fields(text: bytes) -> tuple[str, float | None]:
    words = text.decode("utf-8", "replace").rpartition(", ")[0]
    try:
        since = datetime.strptime(words.rpartition(", ")[2], _TIME).replace(tzinfo=UTC)
    except ValueError:
        return "another process", None
    return words[:160], (datetime.now(UTC) - since).total_seconds()


def _age_s(text: bytes) -> float:
    return _fields(text)[1] or 0.0


def _shown_age(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
