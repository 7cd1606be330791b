"""Open folders and write whole files at any location, of this machine or of a store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.errors import QgateError
from qgate.storage.files import scratch_folder
from qgate.storage.folders import Folder, LocalFolder
from qgate.storage.locations import check_writable, location_of, read_errors
from qgate.storage.object_folders import ObjectFolder
from qgate.storage.removing import refuse_links, remove_files

if TYPE_CHECKING:
    from qgate.storage.locations import Location


def folder_of(location: Location | str) -> Folder:
    """Return the folder at a path or URL, without asking a store yet."""
    parsed = location_of(location)
    return LocalFolder(parsed) if isinstance(parsed, Path) else ObjectFolder(parsed)


def writable_folder(location: Location | str) -> Folder:
    """Return a folder to write to; refuse a store that may leave half a file behind."""
    folder = folder_of(location)
    check_writable(folder.location)
    return folder


def empty_folder(location: Location | str, otherwise: str) -> Folder:
    """Make an empty folder to write to, or raise an error that names the one with files in it."""
    folder = writable_folder(location)
    kind = folder.kind()
    if kind == "file" or (kind == "folder" and folder.names()):
        raise QgateError(f"{str(folder.location)!r} {otherwise}: choose another folder.")
    folder.make()
    return folder


# Whole files -------------------------------------------------------------------------------------


def write_text(location: Location, text: str) -> None:
    write_bytes(location, text.encode("utf-8"))


def write_bytes(location: Location, data: bytes) -> None:
    """Write a file as a whole; `check_writable` refuses stores that do not."""
    folder_of(location.parent).put(location.name, data)


def write_parts(location: Location, parts: Iterable[str]) -> None:
    """Write a text that may be larger than memory; a store receives it when it is complete."""
    with (
        folder_of(location.parent).writing(location.name) as fresh,
        fresh.open("w", encoding="utf-8", newline="") as file,
    ):
        file.writelines(parts)


def create_text(location: Location, text: str) -> None:
    """Write a new file whole, or raise a FileExistsError."""
    if isinstance(location, Path):
        folder_of(location.parent).put(location.name, text.encode("utf-8"), new=True)
        return
    with read_errors(location, FileExistsError):
        if location.exists():
            raise FileExistsError
    write_text(location, text)


@contextlib.contextmanager
def local_files(locations: Sequence[Location]) -> Iterator[list[Path]]:
    """Yield files of this machine to write to, and upload them to a store at the end."""
    paths = [location for location in locations if isinstance(location, Path)]
    if len(paths) == len(locations):
        yield paths
        return
    with scratch_folder() as folder:
        paths = [folder / location.name for location in locations]
        yield paths
        for path, location in zip(paths, locations, strict=True):
            if path.exists():
                write_bytes(location, path.read_bytes())


def remove_file(folder: Location, name: str) -> None:
    """Remove a file of a folder if it exists."""
    if isinstance(folder, Path):
        remove_files(folder, name)
    elif (folder / name).is_file():
        (folder / name).unlink()


def check_no_links(folder: Location, names: Iterable[str]) -> None:
    """Refuse folders to write to that are links; a store has none."""
    if isinstance(folder, Path):
        refuse_links(folder, *names, doing="written")
