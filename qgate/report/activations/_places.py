"""Where a report goes: a folder of this machine, or a store, which takes whole objects alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from qgate.errors import QgateError
from qgate.report._files import write_bytes
from qgate.storage.places import changing, place_of, reaching

if TYPE_CHECKING:
    from upath import UPath

    from qgate.storage.places import Place

T = TypeVar("T")


def home_of(place: Place | str) -> Folder | Store:
    place = place_of(place)
    return Folder(place) if isinstance(place, Path) else Store(place)


class Folder:
    """A folder of this machine."""

    def __init__(self, place: Path) -> None:
        self.place: Place = place
        self._path = place

    def check(self) -> None:
        """Refuses what nothing can be written to; nothing is made."""
        folder = self._path
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not there.is_dir():
            raise QgateError(f"{str(there)!r} is a file; give a folder to write to (save_dir).")
        if not os.access(there, os.W_OK | os.X_OK):
            raise QgateError(
                f"nothing can be written to {str(there)!r}: permission denied. Give another folder "
                "(--visualization.save_dir)."
            )

    def make(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)

    def has(self, name: str) -> bool:
        return (self._path / name).exists() or (self._path / name).is_symlink()

    def texts(self, ending: str) -> list[str]:
        """What the files of such names say, as far as they can be read."""
        found = []
        for path in sorted(self._path.glob(f"*{ending}")):
            with contextlib.suppress(OSError, ValueError):
                found.append(path.read_text(encoding="utf-8"))
        return found

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            path = self._path / name
            if path.is_file():
                path.unlink()

    def drawn(self, names: Sequence[str], draw: Callable[[list[Path]], T]) -> T:
        """Lets files be written under these names."""
        return draw([self._path / name for name in names])


class Store:
    """A place in a store; what is there is looked at once, at first."""

    def __init__(self, place: UPath) -> None:
        self.place: Place = place
        with reaching(place):
            # Without a memory of listings: others write there while a model runs.
            told = {**place.storage_options, "use_listings_cache": False}
            self._fs: Any = type(place.fs)(**told)
            self._root = str(self._fs._strip_protocol(place.path)).rstrip("/")
        self.is_file = False
        self.names = self._names()

    def _names(self) -> set[str]:
        found: set[str] = set()
        with reaching(self.place):
            try:
                told = self._fs.ls(self._root, detail=True)
            except FileNotFoundError as error:
                if "bucket does not exist" in str(error):
                    raise QgateError(f"{str(self.place)!r} is not there: {error}.") from None
                told = []
        for info in told:
            name = str(info["name"])
            if name.rstrip("/") != self._root:
                found.add(name.rstrip("/").rpartition("/")[2])
            elif info.get("type") == "file" and not name.endswith("/"):
                self.is_file = True
        return found

    def check(self) -> None:
        """Refuses what nothing can be written to: an object is put there, and taken away again."""
        if self.is_file:
            raise QgateError(
                f"{str(self.place)!r} is a file; give a folder to write to (save_dir)."
            )
        if not self._root and self._fs.protocol != "memory":
            raise QgateError(f"{str(self.place)!r} names no bucket; add it, and a folder in it.")
        probe = self.place / f".probe-{time.time_ns()}"
        other = "another folder (--visualization.save_dir)"
        try:
            write_bytes(probe, b"")
        except OSError as error:
            raise QgateError(
                f"nothing can be written to {str(self.place)!r}: {error.strerror}. Give {other}."
            ) from None
        try:
            self._remove(probe.name)
        except OSError as error:
            raise QgateError(
                f"nothing can be removed from {str(self.place)!r}: {error.strerror}. A report "
                f"replaces what an earlier one wrote: give {other}. {probe.name} is left there."
            ) from None

    def make(self) -> None:
        """A store knows no folders: what is put there has a name, and that is all."""

    def has(self, name: str) -> bool:
        return name in self.names

    def texts(self, ending: str) -> list[str]:
        """What the objects of such names say; one that cannot be reached is an error."""
        found = []
        for name in sorted(each for each in self.names if each.endswith(ending)):
            with (
                contextlib.suppress(FileNotFoundError, UnicodeDecodeError),
                reaching(self.place / name, FileNotFoundError, UnicodeDecodeError),
            ):
                data: bytes = self._fs.cat_file(f"{self._root}/{name}")
                found.append(data.decode("utf-8"))
        return found

    def remove(self, names: Iterable[str]) -> None:
        there = self._names()
        for name in names:
            if name in there:
                self._remove(name)

    def _remove(self, name: str) -> None:
        with changing(), contextlib.suppress(FileNotFoundError, KeyError):
            self._fs.rm_file(f"{self._root}/{name}")

    def drawn(self, names: Sequence[str], draw: Callable[[list[Path]], T]) -> T:
        """Lets files be written on this machine, puts them there, and removes them here."""
        with tempfile.TemporaryDirectory(prefix="qgate-") as made:
            paths = [Path(made) / name for name in names]
            told = draw(paths)
            for path in paths:
                write_bytes(self.place / path.name, path.read_bytes())
        return told
