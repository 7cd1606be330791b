"""Whole files and folders at any place, of this machine or of a store."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.storage.files import replacing
from qgate.storage.places import changing, reaching

if TYPE_CHECKING:
    from qgate.storage.places import Place


def write_text(place: Place, text: str) -> None:
    write_bytes(place, text.encode("utf-8"))


def write_bytes(place: Place, data: bytes) -> None:
    """Write a file as a whole; `places.check_writable` refuses stores that do not."""
    if isinstance(place, Path):
        with replacing(place) as neighbor:
            neighbor.write_bytes(data)
        return
    with changing(place):
        place.write_bytes(data)


def write_parts(place: Place, parts: Iterable[str]) -> None:
    """Write a text that may be larger than the memory; a store gets it when it is complete."""
    if isinstance(place, Path):
        with replacing(place) as neighbor:
            _write_all(neighbor, parts)
        return
    with tempfile.TemporaryDirectory(prefix="qgate-") as folder:
        whole = Path(folder) / "whole"
        _write_all(whole, parts)
        with changing(place):
            place.fs.put_file(str(whole), place.path)


def _write_all(path: Path, parts: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(parts)


def create_text(place: Place, text: str) -> None:
    """Write a file that is not there yet, or raise a FileExistsError."""
    if isinstance(place, Path):
        with place.open("x", encoding="utf-8") as file:
            file.write(text)
        return
    with reaching(place, FileExistsError):
        if place.exists():
            raise FileExistsError
    write_text(place, text)


@contextlib.contextmanager
def local_files(places: Sequence[Place]) -> Iterator[list[Path]]:
    """Give files of this machine to write to; what is in them is put into a store at the end."""
    paths = [place for place in places if isinstance(place, Path)]
    if len(paths) == len(places):
        yield paths
        return
    with tempfile.TemporaryDirectory(prefix="qgate-") as folder:
        paths = [Path(folder) / place.name for place in places]
        yield paths
        for path, place in zip(paths, places, strict=True):
            if path.exists():
                write_bytes(place, path.read_bytes())


def remove_file(place: Place) -> None:
    """Remove a file, if it is there; nothing is removed through a link to another folder."""
    if place.is_file() and not (isinstance(place, Path) and place.parent.is_symlink()):
        place.unlink()
