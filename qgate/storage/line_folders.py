"""Folders of one writer: lines are appended, and files appear when they are complete.

On this machine lines are appended to one file, which is locked. A store cannot append, so each
append is a new part there, and no part ever changes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from qgate.storage.files import scratch_folder, write_all
from qgate.storage.folders import Folder, LocalFolder
from qgate.storage.locks import open_handle, try_lock


class AnotherWriterError(OSError):
    """Another process writes into the same folder."""


class LineFolder(Protocol):
    """A folder and its only writer. A failure to write is an OSError.

    appends   lines go to one file, and not into parts
    patience  lines that may wait for more: in a store every append is a request
    staging   the folder of this machine in which files are written
    """

    appends: bool
    patience: int
    staging: Path

    def cut(self, end: int, part: int) -> None:
        """Drop the bytes after the last complete line; `part` is the number of the next part."""

    def append(self, data: bytes) -> None:
        """Append whole lines: all of them, or after `undo` none."""

    def undo(self) -> None:
        """Drop lines that are half written."""

    def take(self, name: str) -> None:
        """Move a complete file of `staging` into the folder."""

    def release_pages(self, names: Iterable[str]) -> None:
        """Release the page cache of written files, without waiting for the disk."""

    def close(self) -> None:
        """End the writing."""


def open_line_folder(home: Folder, name: str, part_name: Callable[[int], str]) -> LineFolder:
    """Open a folder to append lines to a file, or to its parts in a store.

    A second writer is refused by an AnotherWriterError where it can be detected.
    """
    if home.path is None:
        return _ObjectLines(home, part_name)
    return _LocalLines(home.path, name)


class _LocalLines:
    appends, patience = True, 1

    def __init__(self, path: Path, name: str) -> None:
        self.staging = path
        self._end = 0
        self._handle = open_handle(path / name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        # File systems with locks detect a second writer here.
        if try_lock(self._handle) is False:
            self.close()
            raise AnotherWriterError(11, "another process writes to it", str(path))

    def cut(self, end: int, part: int) -> None:  # noqa: ARG002
        self._end = end
        os.ftruncate(self._handle, end)

    def append(self, data: bytes) -> None:
        write_all(self._handle, data)
        self._end += len(data)

    def undo(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, self._end)

    def take(self, name: str) -> None:
        """Do nothing: the file is in the folder already."""

    def release_pages(self, names: Iterable[str]) -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        for name in names:
            with contextlib.suppress(OSError):
                handle = open_handle(self.staging / name, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)

    def close(self) -> None:
        os.close(self._handle)


class _ObjectLines:
    """Lines as parts, each created as a new object, which a second writer cannot do again."""

    appends, patience = False, 256

    def __init__(self, home: Folder, part_name: Callable[[int], str]) -> None:
        self._home, self._part_name, self._part = home, part_name, 0
        self._end = contextlib.ExitStack()
        self.staging = self._end.enter_context(scratch_folder())

    def cut(self, end: int, part: int) -> None:  # noqa: ARG002
        self._part = part

    def append(self, data: bytes) -> None:
        try:
            self._home.put(self._part_name(self._part), data, new=True)
        except FileExistsError as error:
            raise AnotherWriterError(17, "another process writes to it", error.filename) from None
        self._part += 1

    def undo(self) -> None:
        """Do nothing: a part is complete or absent."""

    def take(self, name: str) -> None:
        self._home.copy(LocalFolder(self.staging), name, name)
        (self.staging / name).unlink()

    def release_pages(self, names: Iterable[str]) -> None:
        """Do nothing: uploaded files are not on this machine any more."""

    def close(self) -> None:
        self._end.close()
