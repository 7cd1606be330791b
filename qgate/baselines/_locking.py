"""One writer at a time, over processes; a killed one leaves no lock behind."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from qgate.errors import QgateError

NAME = ".lock"
_PAUSE = 0.02


@contextlib.contextmanager
def locked(folder: Path, timeout: float) -> Iterator[None]:
    """Hold the lock of a folder; the system lets go of it when this process ends.

    The file is there only while the lock is held, so a folder under version control stays clean.
    """
    handle = _acquired(folder / NAME, timeout)
    try:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            since = time.strftime("%H:%M:%S")
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}, {since}".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(folder / NAME)  # noqa: PTH108
        os.close(handle)


def _acquired(path: Path, timeout: float) -> int:
    try:
        import fcntl
    except ImportError:
        raise QgateError(
            "baselines cannot be changed on this system, which has no fcntl to lock them with; "
            "change them on Linux or macOS."
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
                    f"the baselines in {str(path.parent)!r} are being updated by {_holder(path)}, "
                    f"and were not free within {timeout:g} s. Run this again when it is done, or "
                    "end that process."
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
