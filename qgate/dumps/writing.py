"""Write a dump; flushed records stay readable, whatever happens afterwards.

A shard gets its name when it is whole, and only then do its records go into the index, by one write
of whole lines. So a reader finds every tensor that a record names, while the run goes on, after a
kill and on a full disk.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import numpy as np
from torch import Tensor

from qgate.dumps.index import Index, SessionDigest, line
from qgate.dumps.layout import (
    INDEX,
    RUN,
    Existing,
    begin,
    index_part_name,
    index_parts_in,
    rank_name,
    shard_name,
    shards_in,
    unfinished_in,
)
from qgate.dumps.record import Record, StoredValues
from qgate.dumps.shards import Block, ShardWriter, block_of, block_of_array, digest_of
from qgate.errors import QgateError
from qgate.storage import locations
from qgate.storage.access import writable_folder
from qgate.storage.line_folders import AnotherWriterError, open_line_folder

_MOST_MISSING = 1000
_RELEASED_AFTER = 64 << 20
_LATEST = 4
"""Finished shards whose memory is handed back: only pages that are on the disk go at once."""


class DumpWriter:
    """Writer of one rank. It is not thread-safe: one thread adds, flushes and closes.

    After a failed write, which is raised once, records are no longer stored but listed as missing.
    `header` holds the settings of the run, the same on all ranks; its `run`, if there is one, tells
    runs apart. `missing` lists the first thousand of `missing_count` that could not be stored.
    """

    def __init__(
        self,
        folder: locations.Location | str,
        *,
        rank: int = 0,
        world_size: int = 1,
        header: Mapping[str, Any] | None = None,
        existing: Existing = "refuse",
        shard_bytes: int = 64 << 20,
    ) -> None:
        if not 0 <= rank < world_size:
            raise QgateError(f"rank {rank} is none of the {world_size} ranks from 0.")
        if shard_bytes < 1:
            raise QgateError(f"shard_bytes={shard_bytes}: a shard has room for a byte at least.")
        files = writable_folder(folder)
        self.folder, self.rank, self.world_size = files.location, rank, world_size
        self.manifest = begin(files, rank, world_size, header, existing)
        self.home = files.inside(rank_name(rank))
        self.records = self.bytes_written = self.missing_count = self._released = 0
        self.failed: str | None = None
        self._shard_bytes = shard_bytes
        self._shard: ShardWriter | None = None
        self._finished: deque[str] = deque(maxlen=_LATEST)
        self._pending: list[Record] = []
        self._missing: list[str] = []
        self._stored: dict[tuple[str, tuple[int, ...], str], StoredValues] = {}
        self._counted: dict[str, StoredValues] = {}
        self._orders: set[int] = set()
        self._closed = False
        self._session = SessionDigest()
        try:
            self._files = open_line_folder(self.home, INDEX, index_part_name)
        except AnotherWriterError:
            raise QgateError(self._two_writers()) from None
        try:
            self._go_on_after_earlier_sessions()
            run, host = str((header or {}).get(RUN, "")), socket.gethostname()
            self._event("open", run=run, existing=existing, pid=os.getpid(), host=host)
        except BaseException as error:
            self._files.close()
            if isinstance(error, AnotherWriterError):
                raise QgateError(self._two_writers()) from None
            raise

    def _two_writers(self) -> str:
        return (
            f"rank {self.rank} is being written to {str(self.folder)!r} by another process: every "
            "process needs a rank or a folder of its own."
        )

    def _go_on_after_earlier_sessions(self) -> None:
        """Cut what is half written, and find the values that are stored already."""
        parts = index_parts_in(self.home)
        if parts and self._files.appends:
            raise QgateError(
                f"{str(self.home.location)!r} has its index in parts, as from a store: nothing is "
                "appended to it. `qgate dumps merge DIR --output FOLDER` makes a dump that can be."
            )
        lines = Index(self.home).read()
        self._files.cut(lines.ends.get(INDEX, 0), max(parts, default=-1) + 1)
        self.home.remove(*unfinished_in(self.home))
        self._next_shard = max(shards_in(self.home), default=-1) + 1
        for record in lines.records:
            self._orders.add(record.order)
            if record.tensor is not None:
                key = (record.dtype, record.shape, record.tensor.digest)
                self._stored.setdefault(key, record.tensor)
            if record.counts is not None:
                self._counted.setdefault(record.counts.digest, record.counts)

    @property
    def next_order(self) -> int:
        """Return the first order after those of earlier sessions of this dump."""
        return max(self._orders, default=-1) + 1

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(self._missing)

    def add(
        self,
        record: Record,
        tensor: Tensor | None = None,
        counts: Mapping[str, np.ndarray[Any, Any]] | None = None,
    ) -> Record:
        """Store a tensor, or counts, and return the record with their location.

        Identical tensors are stored once. The values are read now and not kept: the caller may
        reuse their memory. A record with locations from an earlier `add` keeps them.
        """
        if self._closed:
            raise QgateError(f"the dump in {str(self.folder)!r} is closed.")
        if record.rank != self.rank:
            raise QgateError(f"a record of rank {record.rank} was given to rank {self.rank}.")
        if record.order in self._orders:
            raise QgateError(f"order {record.order} of rank {self.rank} is there already.")
        if self.failed is not None:
            self._miss([record])
            return record
        block = None if tensor is None else block_of(tensor)
        arrays = {name: block_of_array(array) for name, array in (counts or {}).items()}
        try:
            if block is not None:
                stored = self._store(block, record.order)
                record = replace(record, tensor=stored, shape=block.shape, dtype=block.dtype)
            if arrays:
                record = replace(record, counts=self._store_counts(arrays, record.order))
            self._orders.add(record.order)
            self._pending.append(record)
            if self._shard is None:
                is_due = len(self._pending) >= self._files.patience
            else:
                is_due = self._shard.size >= self._shard_bytes
            if is_due:
                self.flush()
        except OSError as error:
            raise self._failure(error, record) from error
        except BaseException:
            self._give_up("the run was stopped", record)
            raise
        return record

    def _store(self, block: Block, order: int) -> StoredValues:
        identity = (block.dtype, block.shape, block.hashed())
        if identity not in self._stored:
            file = self._put({str(order): block})
            self._stored[identity] = StoredValues(file, str(order), identity[2])
        return self._stored[identity]

    def _store_counts(self, arrays: Mapping[str, Block], order: int) -> StoredValues:
        digest, key = digest_of(arrays), f"{order}.counts"
        if digest not in self._counted:
            file = self._put({f"{key}.{name}": block for name, block in arrays.items()})
            self._counted[digest] = StoredValues(file, key, digest)
        return self._counted[digest]

    def _put(self, blocks: Mapping[str, Block]) -> str:
        if self._shard is not None and not self._shard.fits(blocks):
            self.flush()
        if self._shard is None:
            self._shard = ShardWriter(self._files.staging / shard_name(self._next_shard), blocks)
            self._next_shard += 1
        self._shard.add(blocks)
        self.bytes_written += sum(len(block.data) for block in blocks.values())
        return self._shard.path.name

    def flush(self) -> None:
        """Write what was added so far to the disk and into the index.

        It does not stay in memory: a dump is larger than what training can spare.
        """
        if self.failed is not None or self._closed:
            return
        try:
            if self._shard is not None:
                self._shard.finish()
                self._files.take(self._shard.path.name)
            if self._pending:
                lines = "".join(line(record.to_dict()) for record in self._pending)
                self._append(lines)
        except OSError as error:
            raise self._failure(error) from error
        except BaseException:
            self._give_up("the run was stopped")
            raise
        if self._shard is not None:
            self._finished.append(self._shard.path.name)
        if self.bytes_written - self._released >= _RELEASED_AFTER:
            self._released = self.bytes_written
            self._files.release_pages(self._finished)
        self.records += len(self._pending)
        self._shard, self._pending = None, []

    def close(self, missing: Sequence[str] = ()) -> None:
        """Write the last shard, and a closing line that lists what is missing."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._miss(missing)
            try:
                self._event("close", missing=self._missing, missing_count=self.missing_count)
            except OSError as error:
                if self.failed is None:
                    raise self._failure(error) from error
            finally:
                self._closed = True
                self._files.close()

    def __enter__(self) -> DumpWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        self.close([] if kind is None else [f"what came after {kind.__name__}: {error}"[:200]])
        return False

    def _event(self, event: str, **details: Any) -> None:
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        content = {"event": event, "time": when, **details}
        self._append(line(self._session.closing(content) if event == "close" else content))

    def _append(self, lines: str) -> None:
        data = lines.encode("ascii")
        self._files.append(data)
        self._session.add(data)

    def _failure(self, error: OSError, record: Record | None = None) -> QgateError:
        """Return the error to raise; the files stay whole, and the unfinished is missing."""
        is_taken = isinstance(error, AnotherWriterError)
        self._give_up(self._two_writers() if is_taken else error.strerror or str(error), record)
        return QgateError(
            f"the dump in {str(self.folder)!r} cannot be written: {self.failed}. "
            f"{self.records} records of rank {self.rank} are complete and can be read; "
            f"{self.missing_count} are missing, as will be all that follow."
        )

    def _give_up(self, why: str, record: Record | None = None) -> None:
        self.failed = why
        if self._shard is not None:
            self._shard.discard()
            self._shard = None
        self._files.undo()
        self._miss([pending for pending in self._pending if pending is not record])
        self._miss([] if record is None else [record])
        self._pending = []

    def _miss(self, lost: Sequence[Record | str]) -> None:
        self.missing_count += len(lost)
        for item in lost[: max(0, _MOST_MISSING - len(self._missing))]:
            text = item if isinstance(item, str) else f"order {item.order}: {item.title}"
            self._missing.append(text)
