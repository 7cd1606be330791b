"""Listings of a store of objects, and checks that it can be listed and written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from qgate.errors import QgateError
from qgate.storage.folders import Stamp
from qgate.storage.locations import check_writable, read_errors, store_and_path, write_errors

if TYPE_CHECKING:
    from upath import UPath

# Stores that answer for one object and list nothing.
UNLISTABLE = ("http", "https")
# How S3 refuses one of two writes on condition at the same time.
BUSY = "ConditionalRequestConflict"
REMEDY = "see that what you are logged in as may list, write and delete there"
# Fields that identify the content of an object; the last one only changes with it.
_TAGS = ("ETag", "etag", "generation", "md5Hash", "created")
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modify", "Last-Modified", "created")


def stamp_of(info: Mapping[str, Any]) -> Stamp:
    """Return the stamp of an object; its time is 0 where the store does not say it."""
    times = (_moment(info[name]) for name in _TIMES if info.get(name))
    modified = next(filter(None, times), None)
    tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
    moment = int(modified.timestamp() * 1e9) if modified else 0
    return Stamp(int(info.get("size") or 0), moment, tag)


def scheme(location: UPath) -> str:
    return str(location.protocol)


def list_objects(fs: Any, root: str) -> dict[str, Stamp]:
    """List all objects below a path by their names relative to it."""
    fs.invalidate_cache()
    objects = fs.find(root, detail=True)
    if not objects:
        # Some stores hide here why they cannot list; this request raises the reason.
        with contextlib.suppress(FileNotFoundError):
            fs.ls(root)
    start = f"{root}/"
    return {
        name.removeprefix(start): stamp_of(info)
        for name, info in objects.items()
        if name.startswith(start) and not name.endswith("/") and info.get("type") == "file"
    }


def folder_names(root: UPath, noun: str) -> list[str]:
    """List the folders below a root that hold objects."""
    if scheme(root) in UNLISTABLE:
        raise cannot_list(root, noun)
    with read_errors(root):
        names = list_objects(*store_and_path(root))
    return sorted({name.partition("/")[0] for name in names if "/" in name})


def check_store(root: UPath, noun: str, to_write: bool) -> None:
    """Check that a store can be listed; to write, create and remove a new object."""
    if to_write:
        check_writable(root)
    if scheme(root) in UNLISTABLE:
        return
    fs, path = store_and_path(root)
    with read_errors(root):
        list_objects(fs, path)
    if not to_write:
        return
    try:
        with write_errors():
            probe_exclusive(fs, path, noun)
    except OSError as error:
        raise QgateError(
            f"no {noun} can be written in {str(root)!r}: {error.strerror}; {REMEDY}."
        ) from None


def create_new(fs: Any, path: str, data: bytes, noun: str) -> None:
    """Create an object, or raise a FileExistsError."""
    try:
        fs.pipe_file(path, data, mode="create")
    except (TypeError, ValueError, NotImplementedError):
        raise _cannot_exclude(fs, noun) from None
    except OSError as error:
        if "(NotImplemented)" in repr(error.__cause__):
            raise _cannot_exclude(fs, noun) from None
        raise


def probe_exclusive(fs: Any, root: str, noun: str) -> None:
    """Check that a store creates an object, refuses to create it again, and removes it."""
    path = f"{root}/.probe-{time.time_ns()}"
    create_new(fs, path, b"\n", noun)
    try:
        create_new(fs, path, b"\n", noun)
    except FileExistsError:
        return
    else:
        raise _cannot_exclude(fs, noun)
    finally:
        with contextlib.suppress(Exception):
            fs.rm_file(path)


def _cannot_exclude(fs: Any, noun: str) -> QgateError:
    scheme = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    return QgateError(
        f"this {scheme}:// store does not say whether an object is new (a write on condition), so "
        f"two updates at once could not be kept apart: {noun} are read from it and not written. "
        "Update them in a folder, and copy that there."
    )


def cannot_list(location: UPath, noun: str) -> QgateError:
    return QgateError(
        f"{str(location)!r}: what is there cannot be listed by {scheme(location)}://; single "
        f"{noun} can be read, by gates."
    )


def _moment(value: object) -> datetime | None:
    if isinstance(value, datetime):
        return value
    if isinstance(value, int | float):
        return datetime.fromtimestamp(value)
    with contextlib.suppress(ValueError, TypeError):
        return datetime.fromisoformat(str(value))
    return None
