"""The folder of a dump or of a rank: of this machine, or objects of a store below a URL.

Files in it have names and no paths. What is put there is there whole, or not at all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from qgate.errors import QgateError
from qgate.storage import places
from qgate.storage.files import neighbor, replacing

Kind = Literal["folder", "file", "nothing"]


@dataclass(frozen=True)
class Stamp:
    """The figures that tell whether a file has changed; `moment` is in nanoseconds."""

    size: int
    moment: int
    tag: str = ""


class Folder(Protocol):
    """A folder, whose files are read and written by name.

    A failure to write is an OSError. What cannot be read is one too, or a QgateError where a store
    cannot be reached.
    """

    place: places.Place
    pause_s: float
    """How long to wait before looking again whether anything is new."""
    parallel_reads: int
    """How many files to read at a time, as a store takes its time to answer."""

    @property
    def name(self) -> str:
        """Its own name, the last part of where it is."""

    @property
    def path(self) -> Path | None:
        """Return its path on this machine, for what maps or locks files."""

    def at(self, name: str) -> places.Place:
        """Return the place of a file, for people."""

    def inside(self, name: str) -> Folder:
        """Return a folder in this one, whether it is there or not."""

    def fresh(self) -> Folder:
        """Return the same folder as it is now: a store is asked once what there is."""

    def kind(self) -> Kind:
        """Tell what is there under its name."""

    def names(self) -> dict[str, bool]:
        """List what is in it, in order, and whether each is a folder."""

    def stamp(self, name: str = "") -> Stamp | None:
        """Return the stamp of a file, or of the list of names; None where there is none."""

    def open(self, name: str, start: int = 0) -> BinaryIO:
        """Open a file to read it once, from a byte on."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read a range of a file, or less where the file is shorter."""

    def make(self) -> None:
        """Make a folder of this machine, if it is not there; a store knows no folders."""

    def put(self, name: str, data: bytes, *, new: bool = False) -> None:
        """Write a file; a FileExistsError where it has to be new and is not."""

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Give a file of this machine to write to, which is put there at the end."""

    def copy(self, source: Folder, name: str, as_name: str) -> None:
        """Put a file of another folder here, without reading it where that is possible."""

    def remove(self, *names: str) -> None:
        """Remove files, if they are there."""

    def remove_empty(self) -> None:
        """Remove the folder, if it is there and nothing is in it."""

    def begin(self) -> bool:
        """Make the folder, and tell whether it was new; in a store, whether nothing was there."""

    def try_writing(self, probe: str) -> None:
        """Raise an OSError where nothing can be written or removed; nothing is left or made.

        A store gets a file named `probe`. A NotADirectoryError names the file that is in the way.
        """


class NotRemovedError(OSError):
    """A file that was put into a folder to try it cannot be removed; `filename` is its name."""


def files_in(folder: Folder) -> list[str]:
    return [name for name, is_folder in folder.names().items() if not is_folder]


class LocalFolder:
    """A folder of this machine. A link is what it leads to."""

    place: places.Place
    pause_s, parallel_reads = 0.2, 1

    def __init__(self, path: Path) -> None:
        self.place = self._path = path

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
            found = {entry.name: entry.is_dir() for entry in entries}
        return {name: found[name] for name in sorted(found)}

    def stamp(self, name: str = "") -> Stamp | None:
        try:
            stat = (self._path / name).stat()
        except FileNotFoundError:
            return None
        return Stamp(stat.st_size, stat.st_mtime_ns)

    def open(self, name: str, start: int = 0) -> BinaryIO:
        file = (self._path / name).open("rb")
        file.seek(start)
        return file

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
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
        with _neighbor(path, data) as written:
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
                for part in parts_of(source, name):
                    file.write(part)
            return
        try:
            os.link((source.path / name).resolve(), target)
        except OSError:
            shutil.copyfile(source.path / name, target)

    def remove(self, *names: str) -> None:
        for name in names:
            (self._path / name).unlink(missing_ok=True)

    def remove_empty(self) -> None:
        with contextlib.suppress(OSError):
            self._path.rmdir()

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
            raise PermissionError(13, "permission denied", str(nearest))


@contextlib.contextmanager
def _neighbor(path: Path, data: bytes) -> Iterator[Path]:
    with neighbor(path) as written:
        written.write_bytes(data)
        yield written


_AT_ONCE = 16 << 20


def parts_of(folder: Folder, name: str) -> Iterator[bytes]:
    """Read a file, a part at a time."""
    stamp = folder.stamp(name)
    if stamp is None:
        raise QgateError(f"{str(folder.at(name))!r} is not there.")
    for start in range(0, stamp.size, _AT_ONCE):
        part = folder.read(name, start, min(start + _AT_ONCE, stamp.size))
        if len(part) < min(_AT_ONCE, stamp.size - start):
            raise QgateError(f"{str(folder.at(name))!r} was changed while it was copied.")
        yield part
