"""Where the folder of a dump is: a path, or a URL."""

from __future__ import annotations

from pathlib import Path

from qgate.errors import QgateError
from qgate.storage import places
from qgate.storage.folders import Folder, LocalFolder
from qgate.storage.object_folders import ObjectFolder


def folder_of(place: places.Place | str) -> Folder:
    """The folder at a path or URL; a store is not asked before something is read."""
    found = places.place_of(place) if isinstance(place, str) else place
    if isinstance(found, Path):
        return LocalFolder(found)
    return ObjectFolder(found)


def empty_folder(place: places.Place | str, otherwise: str) -> Folder:
    """A folder to write to, made where there is none; an error where it has anything in it."""
    folder = writable_folder(place)
    kind = folder.kind()
    if kind == "file" or (kind == "folder" and folder.names()):
        raise QgateError(f"{str(folder.place)!r} {otherwise}: choose another folder.")
    folder.make()
    return folder


def writable_folder(place: places.Place | str) -> Folder:
    """A folder in a store that does not leave half a file behind."""
    folder = folder_of(place)
    places.check_writable(folder.place)
    return folder
