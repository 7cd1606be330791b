"""Writing a dump: what was added and flushed can be read, whatever happens afterwards.

A shard gets its name when it is whole, and only then are its records put into the index, by one
write of whole lines. So a reader finds every tensor that a record names, while the run goes on,
after a kill and on a full disk.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import numpy as np
from torch import Tensor

from qgate.dumps.begin import Existing, begin
from qgate.dumps.index import Lines, line
from qgate.dumps.layout import RUN, rank_name
from qgate.dumps.rank_files import rank_files
from qgate.dumps.records import Record, StoredValues
from qgate.dumps.shards import Block, ShardWriter, block_of, block_of_array, digest_of
from qgate.errors import QgateError
from qgate.storage import places
from qgate.storage.opening import writable_folder

_MOST_MISSING = 1000


class DumpWriter:
    """One per rank and process. It is not thread-safe: one thread adds, flushes and closes.

    After a write has failed, which is raised once, records are no longer stored but listed as
    missing. `header` is the settings of the run, the same on all ranks; its `run`, if there is one,
    tells runs apart.
    """

    def __init__(
        self,
        folder: places.Place | str,
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
        self.folder, self.rank, self.world_size = files.place, rank, world_size
        self.about = begin(files, rank, world_size, header, existing)
        self._shard_bytes = shard_bytes
        self._shard: ShardWriter | None = None
        self._pending: list[Record] = []
        self._missing: list[str] = []
        self._missing_count = 0
        self._places: dict[tuple[str, tuple[int, ...], str], StoredValues] = {}
        self._counted: dict[str, StoredValues] = {}
        self._orders: set[int] = set()
        self.records = 0
        self.bytes_written = 0
        self.failed: str | None = None
        self.home = files.inside(rank_name(rank))
        self._files = rank_files(self.home, rank)
        self._closed = False
        for record in self._files.found.records:
            self._know(record)
        self._files.found = Lines()
        run = str((header or {}).get(RUN, ""))
        try:
            self._event(
                "open", run=run, existing=existing, pid=os.getpid(), host=socket.gethostname()
            )
        except BaseException as error:
            self._files.close()
            if isinstance(error, FileExistsError):
                raise QgateError(error.strerror or "") from None
            raise

    def _know(self, record: Record) -> None:
        """What an earlier session stored is not stored again."""
        self._orders.add(record.order)
        if record.tensor is not None:
            key = (record.dtype, record.shape, record.tensor.digest)
            self._places.setdefault(key, record.tensor)
        if record.counts is not None:
            self._counted.setdefault(record.counts.digest, record.counts)

    @property
    def next_order(self) -> int:
        """One above the orders that are there, for a run that goes on in this dump."""
        return max(self._orders, default=-1) + 1

    @property
    def missing(self) -> tuple[str, ...]:
        """What could not be stored, the first thousand of `missing_count`."""
        return tuple(self._missing)

    @property
    def missing_count(self) -> int:
        return self._missing_count

    def add(
        self,
        record: Record,
        tensor: Tensor | None = None,
        counts: Mapping[str, np.ndarray[Any, Any]] | None = None,
    ) -> Record:
        """Store it; the record returned says where. Identical tensors are stored once.

        The values are read now and not kept: the caller may reuse their memory. A record that has
        places from an earlier `add` of this writer keeps them.
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
        arrays = {name: block_of_array(each) for name, each in (counts or {}).items()}
        try:
            if block is not None:
                record = replace(
                    record,
                    tensor=self._stored(block, record.order),
                    shape=block.shape,
                    dtype=block.dtype,
                )
            if arrays:
                record = replace(record, counts=self._stored_counts(arrays, record.order))
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

    def _stored(self, block: Block, order: int) -> StoredValues:
        identity = (block.dtype, block.shape, block.digest)
        if identity not in self._places:
            file = self._put({str(order): block})
            self._places[identity] = StoredValues(file, str(order), identity[2])
        return self._places[identity]

    def _stored_counts(self, arrays: Mapping[str, Block], order: int) -> StoredValues:
        digest, key = digest_of(arrays), f"{order}.counts"
        if digest not in self._counted:
            file = self._put({f"{key}.{name}": block for name, block in arrays.items()})
            self._counted[digest] = StoredValues(file, key, digest)
        return self._counted[digest]

    def _put(self, blocks: Mapping[str, Block]) -> str:
        if self._shard is not None and not self._shard.fits(blocks):
            self.flush()
        if self._shard is None:
            self._shard = self._files.shard(blocks)
        self._shard.add(blocks)
        self.bytes_written += sum(len(block.data) for block in blocks.values())
        return self._shard.path.name

    def flush(self) -> None:
        """What was added so far is on disk and in the index."""
        if self.failed is not None or self._closed:
            return
        try:
            if self._shard is not None:
                self._shard.finish()
            self._append("".join(line(record.to_dict()) for record in self._pending))
        except OSError as error:
            raise self._failure(error) from error
        except BaseException:
            self._give_up("the run was stopped")
            raise
        self.records += len(self._pending)
        self._shard, self._pending = None, []

    def close(self, missing: Sequence[str] = ()) -> None:
        """Write the last shard, and that the dump is complete or what is missing from it."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._miss(missing)
            try:
                self._event("close", missing=self._missing, missing_count=self._missing_count)
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

    def _event(self, event: str, **told: Any) -> None:
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._append(line({"event": event, "time": when, **told}))

    def _append(self, text: str) -> None:
        data = text.encode("ascii")
        if data:
            self._files.append(data)

    def _failure(self, error: OSError, record: Record | None = None) -> QgateError:
        """After it: the files are whole, and what was not finished is listed as missing."""
        self._give_up(error.strerror or str(error), record)
        return QgateError(
            f"the dump in {str(self.folder)!r} cannot be written: {self.failed}. "
            f"{self.records} records of rank {self.rank} are complete and can be read; "
            f"{self._missing_count} are missing, as will be all that follow."
        )

    def _give_up(self, why: str, record: Record | None = None) -> None:
        self.failed = why
        if self._shard is not None:
            self._shard.discard()
            self._shard = None
        self._files.undo()
        lost = [each for each in self._pending if record is None or each.order != record.order]
        self._miss([*lost, *([] if record is None else [record])])
        self._pending = []

    def _miss(self, what: Sequence[Record | str]) -> None:
        self._missing_count += len(what)
        for each in what[: max(0, _MOST_MISSING - len(self._missing))]:
            text = each if isinstance(each, str) else f"order {each.order}: {each.title}"
            self._missing.append(text)
