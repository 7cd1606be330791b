"""A folder of a dump as objects of a store: listed once, read in ranges, put whole."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from qgate.errors import QgateError
from qgate.storage import places
from qgate.storage.folders import Folder, Kind, NotRemovedError, Stamp, parts_of
from qgate.storage.object_listing import entry_of

if TYPE_CHECKING:
    from upath import UPath

# What stores say of a write on condition that they do not know.
_UNKNOWN = (TypeError, ValueError, NotImplementedError)


class ObjectFolder:
    """A folder of a store, which is listed once, and again with `fresh`."""

    place: places.Place
    pause_s, parallel_reads = 1.0, 16

    def __init__(self, place: UPath, store: Any = None) -> None:
        self.place = self._url = place
        self._store = store or places.store_of(place)[0]
        self._root = str(self._store._strip_protocol(place.path)).rstrip("/")
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
            found: dict[str, tuple[bool, Stamp]] = {}
            for info in self._infos():
                given = str(info["name"])
                whole = given.rstrip("/")
                self._is_file |= given == self._root and info.get("type") == "file"
                name = whole.removeprefix(f"{self._root}/")
                if whole != self._root and "/" not in name:
                    found[name] = info.get("type") == "directory", _stamp(info)
            self._listed = {name: found[name] for name in sorted(found)}
        return self._listed

    def _infos(self) -> list[dict[str, Any]]:
        with places.reaching(self.place, FileNotFoundError):
            try:
                self._store.invalidate_cache(self._root)
                return list(self._store.ls(self._root, detail=True))
            except FileNotFoundError as error:
                if "bucket does not exist" in str(error):
                    raise QgateError(f"{str(self.place)!r} is not there: {error}.") from None
                return []

    def open(self, name: str, start: int = 0) -> BinaryIO:
        return io.BytesIO(self.read(name, start))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read with an end, as s3fs asks for the size of a file where no range is given."""
        if stop is None:
            stamp = self.stamp(name)
            if stamp is None:
                raise FileNotFoundError(2, "it is not there", str(self.at(name)))
            stop = stamp.size
        if stop <= start:
            return b""
        with places.reaching(self.at(name), FileNotFoundError):
            return bytes(self._store.cat_file(f"{self._root}/{name}", start=start, end=stop))

    # Writing --------------------------------------------------------------------------------------

    def make(self) -> None:
        """Do nothing: what is put there has a name, and that is all."""

    def put(self, name: str, data: bytes, *, new: bool = False) -> None:
        path = f"{self._root}/{name}"
        with places.changing():
            if not new:
                self._store.pipe_file(path, data)
                return
            try:
                self._store.pipe_file(path, data, mode="create")
            except FileExistsError:
                if self._store.cat_file(path) != data:  # else the answer to an earlier try was lost
                    raise
            except Exception as error:
                told = isinstance(error, OSError) and "(NotImplemented)" not in repr(
                    error.__cause__
                )
                if told or not isinstance(error, (OSError, *_UNKNOWN)):
                    raise
                if self._store.exists(path):
                    raise FileExistsError(17, "it is there already", path) from None
                self._store.pipe_file(path, data)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="qgate-") as home:
            made = Path(home) / name
            yield made
            self._take(made, name)

    def _take(self, path: Path, name: str) -> None:
        """Put a file of this machine there."""
        with places.changing():
            self._store.put_file(str(path), f"{self._root}/{name}")

    def copy(self, source: Folder, name: str, as_name: str) -> None:
        """Within a store by the store itself; what it will not copy goes through this process."""
        if source.path is not None:
            self._take(source.path / name, as_name)
            return
        if isinstance(source, ObjectFolder) and source._store == self._store:
            with contextlib.suppress(Exception):
                self._store.cp_file(f"{source._root}/{name}", f"{self._root}/{as_name}")
                return
        with self.writing(as_name) as made, made.open("wb") as file:
            for part in parts_of(source, name):
                file.write(part)

    def remove(self, *names: str) -> None:
        with places.changing():
            for name in names:
                with contextlib.suppress(FileNotFoundError, KeyError):
                    self._store.rm_file(f"{self._root}/{name}")

    def remove_empty(self) -> None:
        """Do nothing: a folder of a store is there as long as anything is in it."""

    def begin(self) -> bool:
        return self.kind() == "nothing"

    def try_writing(self, probe: str) -> None:
        self._names()
        if self._is_file:
            raise NotADirectoryError(20, "it is a file", str(self.place))
        if not self._root and self._store.protocol != "memory":
            raise QgateError(f"{str(self.place)!r} names no bucket; add it, and a folder in it.")
        try:
            self.put(probe, b"\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.place)) from error
        try:
            self.remove(probe)
        except OSError as error:
            raise NotRemovedError(error.errno, error.strerror, probe) from error


def _stamp(info: dict[str, Any]) -> Stamp:
    entry = entry_of(info)
    moment = int(entry.modified.timestamp() * 1e9) if entry.modified else 0
    return Stamp(entry.size, moment, "".join(entry.tag[:1]))
