"""Ranges of files, read into memory that the caller has."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from qgate.storage.folders import Folder


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
