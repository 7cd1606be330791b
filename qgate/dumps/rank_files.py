"""What a writer does in the folder of its rank: shards, and an index that grows by whole lines.

On this machine the index is one file that is locked and appended to. In a store of objects, where
nothing can be appended, it is a new part each time, and no part ever changes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from qgate.dumps.index import Index, Lines
from qgate.dumps.layout import (
    INDEX,
    index_part_name,
    index_parts_in,
    shard_name,
    shards_in,
    unfinished_in,
)
from qgate.dumps.shards import Block, ShardWriter, write_all
from qgate.errors import QgateError
from qgate.storage.files import try_lock
from qgate.storage.folders import Folder, LocalFolder


class RankFiles(Protocol):
    """The files of one rank and their only writer. A failure to write is an OSError."""

    found: Lines
    """What was there already, until the writer has seen it."""
    patience: int
    """Records that wait for no shard before they are put into the index: in a store that is a
    request of its own."""

    def append(self, data: bytes) -> None:
        """Whole lines of the index: all of them, or after `undo` none."""

    def undo(self) -> None:
        """Forget what of the last lines is half written."""

    def shard(self, first: Mapping[str, Block]) -> ShardWriter:
        """The next shard, with room for the first blocks in its head."""

    def close(self) -> None:
        """Nothing more comes."""


def rank_files(home: Folder, rank: int) -> RankFiles:
    """Begin to write; where two writers of a rank can be told apart, the second is refused."""
    if home.path is None:
        return _ObjectFiles(home, rank)
    return _LocalFiles(home, home.path, rank)


class _LocalFiles:
    found: Lines
    patience = 1

    def __init__(self, home: Folder, path: Path, rank: int) -> None:
        self._path = path
        if index_parts_in(home):
            raise QgateError(
                f"{str(path)!r} has its index in parts, as from a store: nothing is appended to "
                "it. `qgate dumps merge DIR --output FOLDER` makes a dump that can be."
            )
        self._handle = os.open(path / INDEX, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            # Where the file system can: a second writer of one rank is found out at once.
            if try_lock(self._handle) is False:
                raise _two_writers(path.parent, rank)
            self.found = Index(home).read()
            self._end = self.found.ends.get(INDEX, 0)
            os.ftruncate(self._handle, self._end)
            home.remove(*unfinished_in(home))
            self._number = max(shards_in(home), default=-1) + 1
        except BaseException:
            os.close(self._handle)
            raise

    def append(self, data: bytes) -> None:
        write_all(self._handle, memoryview(data))
        self._end += len(data)

    def undo(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, self._end)

    def shard(self, first: Mapping[str, Block]) -> ShardWriter:
        self._number += 1
        return ShardWriter(self._path / shard_name(self._number - 1), first)

    def close(self) -> None:
        os.close(self._handle)


class _ObjectFiles:
    """Shards are made on this machine, one at a time, and put into the store when they are whole.

    Each part of the index is created, so that a second writer of a rank meets what the first wrote.
    """

    patience = 256

    def __init__(self, home: Folder, rank: int) -> None:
        self._home, self._rank = home, rank
        self.found = Index(home).read()
        self._part = max(index_parts_in(home), default=-1) + 1
        self._number = max(shards_in(home), default=-1) + 1
        self._made = tempfile.TemporaryDirectory(prefix="qgate-")

    def append(self, data: bytes) -> None:
        try:
            self._home.put(index_part_name(self._part), data, new=True)
        except FileExistsError:
            told = str(_two_writers(self._home.place.parent, self._rank))
            raise FileExistsError(17, told) from None
        self._part += 1

    def undo(self) -> None:
        """A part is there whole, or not at all."""

    def shard(self, first: Mapping[str, Block]) -> ShardWriter:
        self._number += 1
        path = Path(self._made.name) / shard_name(self._number - 1)
        return ShardWriter(path, first, self._put)

    def _put(self, path: Path) -> None:
        self._home.copy(LocalFolder(path.parent), path.name, path.name)
        path.unlink()

    def close(self) -> None:
        self._made.cleanup()


def _two_writers(folder: object, rank: int) -> QgateError:
    return QgateError(
        f"rank {rank} is being written to {str(folder)!r} by another process: every process needs "
        "a rank or a folder of its own."
    )
