"""The files of a place, of this machine or of a store: a folder, or files that change as one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qgate.errors import QgateError
from qgate.storage.folders import Folder, LocalFolder
from qgate.storage.local_transactions import LocalGroup
from qgate.storage.object_folders import ObjectFolder
from qgate.storage.object_listing import check_store, folder_names
from qgate.storage.object_transactions import ObjectGroup
from qgate.storage.places import check_writable, place_of

if TYPE_CHECKING:
    from qgate.storage.places import Place
    from qgate.storage.transactions import FileGroup, FileRules


def folder_of(place: Place | str) -> Folder:
    """Return the folder at a path or URL; a store is not asked before something is read."""
    found = place_of(place)
    return LocalFolder(found) if isinstance(found, Path) else ObjectFolder(found)


def writable_folder(place: Place | str) -> Folder:
    """Return a folder in a store that does not leave half a file behind."""
    folder = folder_of(place)
    check_writable(folder.place)
    return folder


def empty_folder(place: Place | str, otherwise: str) -> Folder:
    """Return a folder to write to, made where there is none; an error where anything is in it."""
    folder = writable_folder(place)
    kind = folder.kind()
    if kind == "file" or (kind == "folder" and folder.names()):
        raise QgateError(f"{str(folder.place)!r} {otherwise}: choose another folder.")
    folder.make()
    return folder


def files_of(folder: Place, rules: FileRules, name: str) -> FileGroup:
    """Return what reads and changes the files of a folder; nothing is asked of a store yet."""
    if isinstance(folder, Path):
        return LocalGroup(folder, rules)
    return ObjectGroup(folder, rules, name)


def folders_in(root: Place, what: str) -> list[Place]:
    """List the folders below a root, whatever is in them; none where there is no root."""
    if isinstance(root, Path):
        return [each for each in sorted(root.iterdir()) if each.is_dir()] if root.is_dir() else []
    return [root / name for name in folder_names(root, what)]


def check_root(root: Place, what: str, writing: bool) -> None:
    """Reach a store before anything is computed; to write, see that an object can be put there."""
    if not isinstance(root, Path):
        check_store(root, what, writing)
