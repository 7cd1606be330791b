"""Handles of files and locks on them, by what the system has: fcntl, msvcrt or neither."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_BINARY = getattr(os, "O_BINARY", 0)
# The byte that msvcrt locks: behind the content, which others may read while it is locked.
_LOCKED_BYTE = 1 << 30


def _optional(name: str) -> Any:
    """Import a module that only some systems have; None elsewhere."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_FCNTL, _MSVCRT = _optional("fcntl"), _optional("msvcrt")
HAS_LOCKS = _FCNTL is not None or _MSVCRT is not None
# Windows neither renames nor removes a file that is open, and opens no folders.
MOVES_OPEN_FILES = _FCNTL is not None


def open_handle(path: Path, flags: int) -> int:
    """Open a file for bytes: without the flag, Windows writes two of them to end a line."""
    return os.open(path, flags | _BINARY | _CLOEXEC, 0o666)


def try_lock(handle: int) -> bool | None:
    """Lock an open file until it is closed or its process ends; None without locks."""
    try:
        return lock_handle(handle)
    except OSError:
        return None


def lock_handle(handle: int) -> bool | None:
    """Lock an open file as `try_lock` does, with the errors of its file system."""
    if _FCNTL is not None:
        try:
            _FCNTL.flock(handle, _FCNTL.LOCK_EX | _FCNTL.LOCK_NB)
        except BlockingIOError:
            return False
        return True
    return None if _MSVCRT is None else _lock_byte(handle)


def _lock_byte(handle: int) -> bool:
    position = os.lseek(handle, 0, os.SEEK_CUR)
    os.lseek(handle, _LOCKED_BYTE, os.SEEK_SET)
    try:
        _MSVCRT.locking(handle, _MSVCRT.LK_NBLCK, 1)
    except OSError:
        return False
    finally:
        os.lseek(handle, position, os.SEEK_SET)
    return True


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where a folder can be opened."""
    if not MOVES_OPEN_FILES:
        return
    handle = open_handle(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
