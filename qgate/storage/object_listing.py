"""What a store of objects lists, and what it says against being asked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from qgate.errors import QgateError
from qgate.storage.object_locks import ObjectLock
from qgate.storage.places import changing, check_writable, reaching, store_of
from qgate.storage.transactions import ListedFile

if TYPE_CHECKING:
    from upath import UPath

# Stores that tell one object and nothing of its neighbors.
UNLISTED = ("http", "https")
REMEDY = "see that what you are logged in as may list, write and delete there"
# What identifies the content of an object, and what only moves with it.
_TAGS = ("ETag", "etag", "generation", "md5Hash", "created")
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modify", "Last-Modified", "created")


def entry_of(info: Mapping[str, Any]) -> ListedFile:
    tag, times = ([info[name] for name in names if info.get(name)] for names in (_TAGS, _TIMES))
    modified = next((_moment(each) for each in times if _moment(each)), None)
    texts = tuple(map(str, tag)), tuple(map(str, times))
    return ListedFile(int(info.get("size") or 0), *texts, modified)


def scheme(place: UPath) -> str:
    return str(place.protocol)


def listed(fs: Any, root: str) -> dict[str, ListedFile]:
    """List all objects below a path by their names there; none where nothing is."""
    fs.invalidate_cache()
    found = fs.find(root, detail=True)
    if not found:
        # Some stores say nothing here of what keeps them from looking.
        with contextlib.suppress(FileNotFoundError):
            fs.ls(root)
    start = f"{root}/"
    return {
        name.removeprefix(start): entry_of(info)
        for name, info in found.items()
        if name.startswith(start) and not name.endswith("/") and info.get("type") == "file"
    }


def folder_names(root: UPath, what: str) -> list[str]:
    """List the folders below a root that have anything in them."""
    if scheme(root) in UNLISTED:
        raise unlisted(root, what)
    with reaching(root):
        names = listed(*store_of(root))
    return sorted({name.partition("/")[0] for name in names if "/" in name})


def check_store(root: UPath, what: str, to_write: bool) -> None:
    """Look into a store; to write, put an object there that is new, and take it away."""
    if to_write:
        check_writable(root)
    if scheme(root) in UNLISTED:
        return
    fs, path = store_of(root)
    with reaching(root):
        listed(fs, path)
    if not to_write:
        return
    probe = f"{path}/.probe-{time.time_ns()}"
    lock = ObjectLock(fs, probe, f"{str(root)!r} is", "delete it.", what)
    try:
        with changing(), lock.held(0.0):
            pass
    except OSError as error:
        raise QgateError(
            f"no {what} can be written in {str(root)!r}: {error.strerror}; {REMEDY}."
        ) from None


def unlisted(place: UPath, what: str) -> QgateError:
    return QgateError(
        f"{str(place)!r}: what is there cannot be listed by {scheme(place)}://; single {what} "
        "can be read, by gates."
    )


def _moment(found: object) -> datetime | None:
    if isinstance(found, datetime):
        return found
    if isinstance(found, int | float):
        return datetime.fromtimestamp(found)
    with contextlib.suppress(ValueError, TypeError):
        return datetime.fromisoformat(str(found))
    return None
