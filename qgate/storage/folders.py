"""Folders of this machine or of a store, whose files are read and written by name.

A file that is put into a folder is complete or absent.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from qgate.errors import QgateError
from qgate.storage import locations
from qgate.storage.files import neighbor, replacing
from qgate.storage.foreign import open_foreign, read_foreign
from qgate.storage.removing import remove_empty_folder, remove_files

Kind = Literal["folder", "file", "nothing"]


@dataclass(frozen=True)
class Stamp:
    """The figures that tell whether a file has changed; `moment` is in nanoseconds."""

    size: int
    moment: int
    tag: str = ""

    @property
    def modified(self) -> datetime | None:
        return datetime.fromtimestamp(self.moment / 1e9) if self.moment else None


class Folder(Protocol):
    """A folder whose files are read and written by name.

    A failure to read or write is an OSError, or a QgateError where a store cannot be reached.
    """

    location: locations.Location
    pause_s: float
    """Pause between two looks for new files."""
    parallel_reads: int
    """Number of files to read at a time, as each request to a store takes time."""

    @property
    def name(self) -> str:
        """Return the last part of its location."""

    @property
    def path(self) -> Path | None:
        """Return its path on this machine, to map or lock files; None for a store."""

    def at(self, name: str) -> locations.Location:
        """Return the location of a file, to be shown."""

    def inside(self, name: str) -> Folder:
        """Return a folder in this one, which need not exist."""

    def fresh(self) -> Folder:
        """Return the folder as it is now: the listing of a store is read once per object."""

    def kind(self) -> Kind:
        """Tell whether its name is a folder, a file or nothing."""

    def names(self) -> dict[str, bool]:
        """List the names in it, in order, and whether each is a folder."""

    def stamp(self, name: str = "") -> Stamp | None:
        """Return the stamp of a file, or of the list of names; None where there is none."""

    def open(self, name: str, start: int = 0) -> BinaryIO:
        """Open a file to read it once, from a byte on."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read a range of a file, or less where the file is shorter."""

    def make(self) -> None:
        """Make the folder if it is missing; a store has no folders to make."""

    def put(self, name: str, data: bytes, *, new: bool = False) -> None:
        """Write a file; a `new` one that exists raises a FileExistsError."""

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Yield a file of this machine to write to, which is put into the folder at the end."""

    def copy(self, source: Folder, name: str, as_name: str) -> None:
        """Copy a file of another folder here, without reading it where that is possible."""

    def remove(self, *names: str) -> None:
        """Remove the files that exist."""

    def remove_empty(self) -> None:
        """Remove the folder if it exists and is empty."""

    def begin(self) -> bool:
        """Make the folder, and tell whether it is new; in a store, whether it has no objects."""

    def try_writing(self, probe: str) -> None:
        """Raise an OSError where nothing can be written or removed, and leave no trace.

        A store gets a file named `probe`. A NotADirectoryError names the file that is in the way.
        """


class NotRemovedError(OSError):
    """A probe that was written into a folder cannot be removed; `filename` is its name."""


def links_outside(root: Folder, folder: Folder, name: str) -> bool:
    """Tell whether links lead from a file out of a folder above it; a store has no links."""
    if root.path is None or folder.path is None:
        return False
    return not (folder.path / name).resolve().is_relative_to(root.path.resolve())


def links_away(root: Folder, neighbor_name: str, folder: Folder, name: str) -> bool:
    """Tell whether links lead from a file out of a folder, and not to where a neighbor's lead."""
    if not links_outside(root, folder, name) or root.path is None or folder.path is None:
        return False
    home = (root.path / neighbor_name).resolve().parent
    return not (folder.path / name).resolve().is_relative_to(home)


def files_in(folder: Folder) -> list[str]:
    return [name for name, is_folder in folder.names().items() if not is_folder]


class LocalFolder:
    """A folder of this machine; a link stands for its target."""

    location: locations.Location
    pause_s, parallel_reads = 0.2, 1

    def __init__(self, path: Path) -> None:
        self.location = self._path = path

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def path(self) -> Path | None:
        return self._path

    def at(self, name: str) -> Path:
        return self._path / name

    def inside(self, name: str) -> LocalFolder:
        return LocalFolder(self._path / name)

    def fresh(self) -> LocalFolder:
        return self

    def kind(self) -> Kind:
        if self._path.is_dir():
            return "folder"
        return "file" if self._path.exists() else "nothing"

    def names(self) -> dict[str, bool]:
        with os.scandir(self._path) as entries:
            is_folder = {entry.name: entry.is_dir() for entry in entries}
        return {name: is_folder[name] for name in sorted(is_folder)}

    def stamp(self, name: str = "") -> Stamp | None:
        try:
            stat = (self._path / name).stat()
        except FileNotFoundError:
            return None
        return Stamp(stat.st_size, stat.st_mtime_ns)

    def open(self, name: str, start: int = 0) -> BinaryIO:
        file = open_foreign(self._path / name, "files of data", None)
        file.seek(start)
        return file

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is None and not start:
            return read_foreign(self._path / name, "files of data")
        with self.open(name, start) as file:
            return file.read() if stop is None else file.read(stop - start)

    def make(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, data: bytes, *, new: bool = False) -> None:
        path = self._path / name
        if not new:
            with replacing(path) as fresh:
                fresh.write_bytes(data)
            return
        with neighbor(path) as written:
            written.write_bytes(data)
            try:
                os.link(written, path)
            except FileExistsError:
                raise
            except OSError:  # a file system without links
                if path.exists():
                    raise FileExistsError(17, os.strerror(17), str(path)) from None
                written.replace(path)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        with replacing(self._path / name) as fresh:
            yield fresh

    def copy(self, source: Folder, name: str, as_name: str) -> None:
        target = self._path / as_name
        if source.path is None:
            with self.writing(as_name) as fresh, fresh.open("wb") as file:
                for part in read_parts(source, name):
                    file.write(part)
            return
        try:
            os.link((source.path / name).resolve(), target)
        except OSError:
            shutil.copyfile(source.path / name, target)

    def remove(self, *names: str) -> None:
        remove_files(self._path, *names)

    def remove_empty(self) -> None:
        remove_empty_folder(self._path)

    def begin(self) -> bool:
        try:
            self._path.mkdir()
        except FileExistsError:
            return False
        return True

    def try_writing(self, probe: str) -> None:  # noqa: ARG002
        nearest = next(p for p in (self._path, *self._path.absolute().parents) if p.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(20, "it is a file", str(nearest))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(13, os.strerror(13), str(nearest))


_AT_ONCE = 16 << 20


def read_parts(folder: Folder, name: str) -> Iterator[bytes]:
    """Read a file, a part at a time."""
    stamp = folder.stamp(name)
    if stamp is None:
        raise QgateError(f"{str(folder.at(name))!r} is not there.")
    for start in range(0, stamp.size, _AT_ONCE):
        part = folder.read(name, start, min(start + _AT_ONCE, stamp.size))
        if len(part) < min(_AT_ONCE, stamp.size - start):
            raise QgateError(f"{str(folder.at(name))!r} was changed while it was copied.")
        yield part


class FileRanges:
    """Reads ranges of the files of a folder; on this machine the last file stays open."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._open: tuple[str, BinaryIO] | None = None

    def read_into(self, target: memoryview, name: str, start: int) -> int:
        """Fill memory with a file's bytes from `start` on; return how many there are."""
        if self._folder.path is None:
            data = self._folder.read(name, start, start + len(target)) if target else b""
            target[: len(data)] = data
            return len(data)
        source = self._opened(name)
        source.seek(start)
        count = 0
        while count < len(target):
            length = source.readinto(target[count:])  # type: ignore[attr-defined]
            if not length:
                break
            count += length
        return count

    def _opened(self, name: str) -> BinaryIO:
        if self._open is None or self._open[0] != name:
            self.close()
            self._open = name, self._folder.open(name)
        return self._open[1]

    def close(self) -> None:
        """Close the file that was read last."""
        if self._open is not None:
            with contextlib.suppress(OSError):
                self._open[1].close()
        self._open = None

    __del__ = close
