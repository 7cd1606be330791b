"""New folders that appear when they are complete, and are removed if anything goes wrong.

On this machine a folder is filled under a temporary name and renamed at the end. A store cannot
rename: there the object that identifies the folder is written last.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from qgate.errors import QgateError
from qgate.storage import locations
from qgate.storage.access import empty_folder, writable_folder
from qgate.storage.files import neighbor
from qgate.storage.folders import Folder, LocalFolder
from qgate.storage.removing import remove_empty_folder


@contextlib.contextmanager
def new_folder(
    location: locations.Location | str, mark: str, remove: Callable[[Folder], None]
) -> Iterator[Folder]:
    """Yield a new folder to fill; a store keeps a `mark` in it until the end.

    `remove` empties a folder of a store that was not filled to its end.
    """
    output = writable_folder(location)
    quoted = repr(str(output.location))
    names = output.names() if output.kind() == "folder" else {}
    if mark in names:
        raise QgateError(
            f"{quoted} is being merged into, or has what a merge left that was killed: remove it, "
            "or choose another folder."
        )
    if names or output.kind() == "file":
        raise QgateError(f"{quoted} is there already: choose another folder.")
    if output.path is None:
        with _marked(output, mark, remove):
            yield output
        return
    if not output.path.name:
        raise QgateError(f"{quoted} is where this runs: choose another folder.")
    output.path.parent.mkdir(parents=True, exist_ok=True)
    with neighbor(output.path, folder=True) as part:
        yield LocalFolder(part)
        for leftover in part.glob(".*"):  # of a worker that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        part.replace(output.path)


@contextlib.contextmanager
def filled_folder(location: locations.Location | str) -> Iterator[Folder]:
    """Yield a folder to fill, which takes the place of a missing or an empty one at the end.

    A store gets its files as they are written.
    """
    output = empty_folder(location, "is not empty")
    if output.path is None or (target := output.path.resolve()) == Path.cwd():
        yield output
        return
    with neighbor(target, folder=True) as part:
        yield LocalFolder(part)
        remove_empty_folder(target)
        part.replace(target)


@contextlib.contextmanager
def _marked(output: Folder, mark: str, remove: Callable[[Folder], None]) -> Iterator[None]:
    output.put(mark, b"\n", new=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            remove(output.fresh())
            output.remove(mark)
        raise
    with contextlib.suppress(OSError):
        output.remove(mark)


@contextlib.contextmanager
def new_subfolder(output: Folder, name: str) -> Iterator[Folder]:
    """Yield a subfolder to fill that other processes may fill too: the first complete one stays.

    An empty one does not appear.
    """
    if output.path is None:
        yield output.inside(name)
        return
    part, complete = output.path / f".{name}.{uuid.uuid4().hex}", output.path / name
    part.mkdir()
    yield LocalFolder(part)
    if not any(part.iterdir()):
        part.rmdir()
        return
    try:
        part.rename(complete)
    except OSError:
        if not complete.is_dir():
            raise
        shutil.rmtree(part)


@contextlib.contextmanager
def temporary_beside(home: Folder, prefix: str) -> Iterator[Path]:
    """Yield a temporary folder, beside a folder of this machine where there is one."""
    beside = None if home.path is None else home.path.parent
    with tempfile.TemporaryDirectory(dir=beside, prefix=prefix) as path:
        yield Path(path)
