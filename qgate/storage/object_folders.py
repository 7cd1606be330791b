"""Folders as objects of a store: listed once, read in ranges, uploaded whole."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from qgate.errors import QgateError
from qgate.storage import locations
from qgate.storage.files import scratch_folder
from qgate.storage.folders import Folder, Kind, NotRemovedError, Stamp, read_parts

if TYPE_CHECKING:
    from upath import UPath

# Fields that identify the content of an object; the last one only changes with it.
_TAGS = ("ETag", "etag", "generation", "md5Hash", "created")
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modify", "Last-Modified", "created")


class ObjectFolder:
    """A folder of a store, which is listed once, and again with `fresh`."""

    location: locations.Location
    pause_s, parallel_reads = 1.0, 16

    def __init__(self, location: UPath, store: Any = None) -> None:
        self.location = self._url = location
        self._store = store or locations.store_and_path(location)[0]
        self._root = str(self._store._strip_protocol(location.path)).rstrip("/")
        self._listed: dict[str, tuple[bool, Stamp]] | None = None
        self._is_file = False

    @property
    def name(self) -> str:
        return self._root.rpartition("/")[2]

    @property
    def path(self) -> None:
        return None

    def at(self, name: str) -> UPath:
        return self._url / name

    def inside(self, name: str) -> ObjectFolder:
        return ObjectFolder(self._url / name, self._store)

    def fresh(self) -> ObjectFolder:
        return ObjectFolder(self._url, self._store)

    def kind(self) -> Kind:
        if self._names():
            return "folder"
        return "file" if self._is_file else "nothing"

    def names(self) -> dict[str, bool]:
        return {name: is_folder for name, (is_folder, _) in self._names().items()}

    def stamp(self, name: str = "") -> Stamp | None:
        if not name:
            return Stamp(len(self._names()), 0)
        is_folder, stamp = self._names().get(name, (True, None))
        return None if is_folder else stamp

    def _names(self) -> dict[str, tuple[bool, Stamp]]:
        if self._listed is None:
            entries: dict[str, tuple[bool, Stamp]] = {}
            for info in self._infos():
                path = str(info["name"])
                self._is_file |= path == self._root and info.get("type") == "file"
                path = path.rstrip("/")
                name = path.removeprefix(f"{self._root}/")
                if path != self._root and "/" not in name:
                    entries[name] = info.get("type") == "directory", _stamp(info)
            self._listed = {name: entries[name] for name in sorted(entries)}
        return self._listed

    def _infos(self) -> list[Mapping[str, Any]]:
        with locations.read_errors(self.location, FileNotFoundError):
            try:
                self._store.invalidate_cache(self._root)
                return list(self._store.ls(self._root, detail=True))
            except FileNotFoundError as error:
                if "bucket does not exist" in str(error):
                    raise QgateError(f"{str(self.location)!r} is not there: {error}.") from None
                return []

    def open(self, name: str, start: int = 0) -> BinaryIO:
        return io.BytesIO(self.read(name, start))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read with an end, as s3fs asks for the size of a file that has no range."""
        if stop is None:
            stamp = self.stamp(name)
            if stamp is None:
                raise FileNotFoundError(2, "it is not there", str(self.at(name)))
            stop = stamp.size
        if stop <= start:
            return b""
        with locations.read_errors(self.at(name), FileNotFoundError):
            return bytes(self._store.cat_file(f"{self._root}/{name}", start=start, end=stop))

    # Writing --------------------------------------------------------------------------------------

    def make(self) -> None:
        """Do nothing: a store knows objects and no folders."""

    def put(self, name: str, data: bytes, *, new: bool = False) -> None:
        path = f"{self._root}/{name}"
        with locations.write_errors(self.at(name)):
            if not new:
                self._store.pipe_file(path, data)
                return
            try:
                self._store.pipe_file(path, data, mode="create")
            except FileExistsError:
                if self._store.cat_file(path) != data:  # else the answer to an earlier try was lost
                    raise
            except (TypeError, ValueError, NotImplementedError, OSError) as error:
                if isinstance(error, OSError) and "(NotImplemented)" not in repr(error.__cause__):
                    raise
                # A store that does not know writes on condition.
                if self._store.exists(path):
                    raise FileExistsError(17, "it is there already", path) from None
                self._store.pipe_file(path, data)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        with scratch_folder() as home:
            path = home / name
            yield path
            self._upload(path, name)

    def _upload(self, path: Path, name: str) -> None:
        """Upload a file of this machine."""
        with locations.write_errors(self.at(name)):
            self._store.put_file(str(path), f"{self._root}/{name}")

    def copy(self, source: Folder, name: str, as_name: str) -> None:
        """Let a store copy its own objects; others go through this process."""
        if source.path is not None:
            self._upload(source.path / name, as_name)
            return
        if isinstance(source, ObjectFolder) and source._store == self._store:
            with contextlib.suppress(Exception):
                self._store.cp_file(f"{source._root}/{name}", f"{self._root}/{as_name}")
                return
        with self.writing(as_name) as path, path.open("wb") as file:
            for part in read_parts(source, name):
                file.write(part)

    def remove(self, *names: str) -> None:
        with locations.write_errors(self.location):
            for name in names:
                with contextlib.suppress(FileNotFoundError, KeyError):
                    self._store.rm_file(f"{self._root}/{name}")

    def remove_empty(self) -> None:
        """Do nothing: a folder of a store exists as long as it has objects."""

    def begin(self) -> bool:
        return self.kind() == "nothing"

    def try_writing(self, probe: str) -> None:
        self._names()
        if self._is_file:
            raise NotADirectoryError(20, "it is a file", str(self.location))
        if not self._root and self._store.protocol != "memory":
            raise QgateError(f"{str(self.location)!r} names no bucket; add it, and a folder in it.")
        try:
            self.put(probe, b"\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.location)) from error
        try:
            self.remove(probe)
        except OSError as error:
            raise NotRemovedError(error.errno, error.strerror, probe) from error


def _stamp(info: Mapping[str, Any]) -> Stamp:
    """Return the stamp of an object; its time is 0 where the store does not say it."""
    times = (_moment(info[name]) for name in _TIMES if info.get(name))
    modified = next(filter(None, times), None)
    tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
    moment = int(modified.timestamp() * 1e9) if modified else 0
    return Stamp(int(info.get("size") or 0), moment, tag)


def _moment(value: object) -> datetime | None:
    if isinstance(value, datetime):
        return value
    if isinstance(value, int | float):
        return datetime.fromtimestamp(value)
    with contextlib.suppress(ValueError, TypeError):
        return datetime.fromisoformat(str(value))
    return None
