"""Write the files of a result into a folder, each as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qgate.errors import QgateError
from qgate.storage.access import folder_of, write_text
from qgate.storage.locations import check_writable

if TYPE_CHECKING:
    from qgate.storage.locations import Location


def check_folder(folder: Location) -> None:
    """Refuse a folder that cannot be written to, before anything is compared."""
    check_writable(folder)
    if folder_of(folder).kind() == "file":
        raise QgateError(f"--output-dir {str(folder)!r} is a file; name a folder.")


def write_all(folder: Location, files: Mapping[str, str]) -> Location:
    """Write texts by the names of their files, and return the last of these, the page."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_text(folder / name, text)
    return folder / name
