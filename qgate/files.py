"""Files that are written whole or not at all, and by one process at a time."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from qgate.errors import QgateError

_PAUSE = 0.02


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A neighbor to write to, which takes the place of `path` at the end.

    Whatever goes wrong inside, a full disk or a kill, `path` is what it was, or not there.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    os.close(handle)
    written = Path(name)
    try:
        yield written
        mask = os.umask(0)
        os.umask(mask)
        written.chmod(0o666 & ~mask)
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def lock(path: Path, timeout: float, what: str) -> Iterator[None]:
    """Hold a lock over processes; the system lets go of it when this process ends.

    `path` is there only while the lock is held, so a folder under version control stays clean.
    `what` says what it guards, as `the baselines in 'b' are`.
    """
    handle = _acquired(path, timeout, what)
    try:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            since = time.strftime("%H:%M:%S")
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}, {since}".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108
        os.close(handle)


def _acquired(path: Path, timeout: float, what: str) -> int:
    try:
        import fcntl
    except ImportError:
        raise QgateError(
            f"{what} to be changed by one process at a time, and this system has no fcntl to lock "
            "files with; do it on Linux or macOS."
        ) from None
    end = time.monotonic() + timeout
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, handle):
                return handle
            os.close(handle)
        except BlockingIOError:
            os.close(handle)
            if time.monotonic() >= end:
                raise QgateError(
                    f"{what} being updated by {_holder(path)}, and not free within {timeout:g} s. "
                    "Run this again when it is done, or end that process."
                ) from None
            time.sleep(_PAUSE)
        except BaseException:
            os.close(handle)
            raise


def _is_still(path: Path, handle: int) -> bool:
    """Whether the locked file is the one others find; its last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        text = ""
    return text[:120] or "another process"
