"""Files of this machine, written whole or not at all, by one process at a time."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from qgate.errors import QgateError
from qgate.storage.locks import HAS_LOCKS, MOVES_OPEN_FILES, lock_handle, open_handle, try_lock

_PAUSE = 0.02
_SCRATCH = "qgate-scratch-"
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a neighbor to write to, which replaces `path` at the end.

    After a full disk or a kill, `path` is as it was before.
    """
    with naming(path), neighbor(path) as written:
        yield written
        written.replace(path)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of the system name the requested file, not its lock or a neighbor.

    An error while a file is written, as on a full disk, names none.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error.filename, int):
            raise
        if error.filename is None or f".{path.name}." in Path(error.filename).name:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextlib.contextmanager
def neighbor(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """Yield an empty file or folder beside `path`, owned by this process and removed at the end.

    The next writer of the same path removes one that a killed process has left: it has the same
    name, and no process holds its lock.
    """
    try:
        written, handle = _reserve(path, folder)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    mine = written.stat() if handle is None else os.fstat(handle)
    try:
        yield written
    finally:
        with contextlib.suppress(OSError):
            if os.path.samestat(mine, written.stat()):
                shutil.rmtree(written) if folder else written.unlink()
            else:  # a neighbor of the next writer, or something that was moved to this name
                _remove_abandoned(written, folder)
        if handle is not None:
            os.close(handle)


def temporary_file(prefix: str) -> tuple[Path, int]:
    """Open a new temporary file of this process, which has to remove it.

    Files of the same prefix that killed processes of this host have left are removed now.
    """
    prefix = f"{prefix}{_host()}."
    for leftover in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_abandoned(leftover, folder=False)
    while True:
        handle, name = tempfile.mkstemp(prefix=prefix)
        if try_lock(handle) is not False and _is_still(Path(name), handle):
            return Path(name), handle
        os.close(handle)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new temporary folder, owned by this process and removed at the end.

    Those that killed processes of this host have left are removed now.
    """
    prefix = f"{_SCRATCH}{_host()}."
    for leftover in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_abandoned(leftover, folder=True)
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        # Another process may take it for one that was left until it is locked.
        try:
            handle = open_handle(path, os.O_RDONLY) if MOVES_OPEN_FILES else None
        except FileNotFoundError:
            continue
        if handle is None or (try_lock(handle) is not False and _is_still(path, handle)):
            break
        os.close(handle)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _host() -> str:
    """Return the name of this host: hosts that share a folder need not see locks of another."""
    return re.sub(r"[^A-Za-z0-9-]", "_", socket.gethostname())[:64]


def remove_with_leftovers(path: Path) -> None:
    """Remove a file if it exists, and neighbors that its killed writers have left."""
    path.unlink(missing_ok=True)
    _remove_all_abandoned(path, 0, folder=False)


def _part(path: Path, number: int) -> Path:
    """Return the name of a neighbor; processes that write at once count upwards."""
    return path.with_name(f".{path.name}.{f'{number}.' if number else ''}part")


def _reserve(path: Path, folder: bool) -> tuple[Path, int | None]:
    """Create a neighbor for this process alone, with a handle that holds its lock.

    There is no handle where it would keep the neighbor from being moved.
    """
    number = 0
    while True:
        written = _part(path, number)
        _remove_abandoned(written, folder)
        try:
            handle = _create_folder(written) if folder else _create(written)
        except FileExistsError:
            number += 1
            continue
        except FileNotFoundError:
            if not folder or not written.parent.is_dir():
                raise
            continue  # removed before it was locked, as one that was left
        if handle is None:
            return written, None
        if try_lock(handle) is not False and _is_still(written, handle):
            _remove_all_abandoned(path, number + 1, folder)
            return written, handle
        os.close(handle)


def _create(path: Path) -> int | None:
    """Create a file with the permissions of new files."""
    handle = open_handle(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    if MOVES_OPEN_FILES:
        return handle
    os.close(handle)
    return None


def _create_folder(path: Path) -> int | None:
    path.mkdir()
    return open_handle(path, os.O_RDONLY) if MOVES_OPEN_FILES else None


def _remove_all_abandoned(path: Path, number: int, folder: bool) -> None:
    while os.path.lexists(part := _part(path, number)):
        _remove_abandoned(part, folder)
        number += 1


def _remove_abandoned(path: Path, folder: bool) -> None:
    """Remove a neighbor that no process locks; leave other kinds of files alone."""
    if not MOVES_OPEN_FILES:  # nothing tells a neighbor in use from one that was left
        return
    kind = os.O_RDONLY | _DIRECTORY if folder else os.O_RDWR
    try:
        handle = open_handle(path, kind | _NOFOLLOW)
    except OSError:
        return
    try:
        if try_lock(handle) and _is_still(path, handle):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if folder else path.unlink()
    finally:
        os.close(handle)


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all data: one call of the system writes at most 2 GB."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(handle, remaining) :]


def lock_or_none(path: Path) -> int | None:
    """Create a file and lock it until the handle is closed; None while another process does.

    Without locks on this system nothing is locked.
    """
    while True:
        handle = open_handle(path, os.O_RDWR | os.O_CREAT | _NOFOLLOW)
        is_ours = try_lock(handle)
        if is_ours is None or (is_ours and _is_still(path, handle)):
            return handle
        os.close(handle)
        if not is_ours:
            return None


@contextlib.contextmanager
def lock(path: Path, timeout: float, subject: str) -> Iterator[None]:
    """Hold a lock across processes; the system releases it when this process ends.

    On a system without locks the file itself is the lock, and outlives a killed process.
    `path` exists only while the lock is held, so a folder under version control stays clean.
    `subject` begins the messages, as `the baselines in 'b' are` does.
    """
    handle = _acquire(path, timeout, subject)
    try:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            since = time.strftime("%H:%M:%S")
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}, {since}".encode())
        yield
    finally:
        if not MOVES_OPEN_FILES:
            os.close(handle)
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108
        if MOVES_OPEN_FILES:
            os.close(handle)


def _acquire(path: Path, timeout: float, subject: str) -> int:
    end = time.monotonic() + timeout
    while True:
        handle = _open_lock(path)
        try:
            is_ours = handle is not None and lock_handle(handle) is not False
            if handle is not None and is_ours and _is_still(path, handle):
                return handle
        except BaseException:
            if handle is not None:
                os.close(handle)
            raise
        if handle is not None:
            os.close(handle)
        if is_ours:
            continue
        if time.monotonic() >= end:
            hint = "" if HAS_LOCKS else f"; if it has ended already, remove {str(path)!r}"
            raise QgateError(
                f"{subject} being updated by {_holder(path)}, and not free within {timeout:g} s. "
                f"Run this again when it is done, or end that process{hint}."
            )
        time.sleep(_PAUSE)


def _open_lock(path: Path) -> int | None:
    """Open the file of a lock; None if it exists on a system where it is the lock itself."""
    kind = os.O_RDWR | os.O_CREAT | _NOFOLLOW
    try:
        return open_handle(path, kind if HAS_LOCKS else kind | os.O_EXCL)
    except OSError as error:
        if path.is_symlink():
            raise QgateError(
                f"the lock {str(path)!r} is a link, and is not followed: remove it."
            ) from None
        if isinstance(error, FileExistsError):
            return None
        raise


def _is_still(path: Path, handle: int) -> bool:
    """Tell whether the locked file still has its name; its last holder may have removed it."""
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
