"""Read a dump, also one that is still being written or whose writer was killed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Literal

import numpy as np
from torch import Tensor

from qgate.charts.overviews import Overview, Overviewed
from qgate.dumps.index import EVENT, Index, IndexLines
from qgate.dumps.layout import (
    INDEX,
    MANIFEST,
    DumpManifest,
    rank_name,
    ranks_in,
    read_manifest,
    unfinished_in,
)
from qgate.dumps.record import Record, RecordSelection
from qgate.dumps.shards import ShardReader
from qgate.errors import QgateError, unknown
from qgate.loading import LateModule
from qgate.storage import locations
from qgate.storage.access import folder_of
from qgate.storage.folders import Folder, Stamp
from qgate.text import counted, shortened

_tensor_saver: Any = LateModule("qgate.dumps.tensor_saver_files")
"""Reads folders of the one other collector that is known; it extends what is here."""
_RANKS_OPEN = 16
_MOST_RECORDS = 20_000
"""Records of ranks that a dump keeps in memory; those of more ranks are read again."""
State = Literal["complete", "incomplete", "running or killed", "not told"]


@dataclass
class _RankIndex:
    """The index of a rank as it was read; `records` may be None, to be read again."""

    stamp: tuple[Stamp | None, ...]
    lines: IndexLines
    count: int
    records: list[Record] | None


@dataclass(frozen=True)
class RankState:
    """State of one rank: complete or not, and what is missing or damaged.

    state        incomplete: closed, and something is missing; not told: by megatron-tensor-saver
    missing      records that could not be written, the first of `missing_count`
    torn         lines of the index that are no records, and a last one that is not whole
    damaged      those among them that no writer leaves behind
    unfinished   shards under a temporary name
    cut_off      earlier sessions that did not end
    """

    rank: int
    state: State
    records: int
    missing: tuple[str, ...] = ()
    missing_count: int = 0
    torn: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    cut_off: int = 0

    def notes(self) -> list[str]:
        """List notes for a reader of the records; none for a complete rank."""
        notes = []
        if self.state == "running or killed":
            notes.append("it was not closed: its writer is at work or was killed")
        if self.missing_count:
            several = self.missing_count > 1
            count = f"{self.missing_count} are missing" if several else "missing"
            first = f": {self.missing[0]}" if self.missing else ""  # a closing line may name none
            notes.append(f"{count}{first}{', …' if several else ''}")
        if self.cut_off:
            notes.append(f"{self.cut_off} earlier sessions were cut off")
        notes += [*self.torn, *(f"{name} is not finished" for name in self.unfinished)]
        return [f"rank {self.rank}: {note}" for note in notes]


class Dump(Overviewed):
    """Records of a dump and their tensors. `Dump.open` reads what is written by now.

    A dump on this machine shows records as they are written; one in a store of objects has the
    records of the time when it was opened.

    folder    its path or URL
    header    settings of the collector
    skipped   files that are no part of it, each with a reason
    damaged   those among them that were a part of it: torn, empty; and an edited description
    """

    is_foreign = False
    """True where another program wrote it."""

    def __init__(self, files: Folder, manifest: DumpManifest) -> None:
        self.files, self.manifest = files, manifest
        self.folder: locations.Location = files.location
        self.header: dict[str, object] = manifest.header
        self.skipped: list[str] = []
        self.damaged: list[str] = []
        if manifest.is_edited:
            self.damaged.append(f"{MANIFEST} is not as it was written: its digest is another one")
        self._homes: dict[int, Folder] = {}
        self._indexes: dict[int, _RankIndex] = {}
        self._lock = Lock()
        self._shards: dict[int, ShardReader] = {}

    @classmethod
    def open(cls, folder: locations.Location | str) -> Dump:
        """Open a dump of qgate, or a folder of megatron-tensor-saver as it is, by path or URL."""
        files = folder_of(folder)
        kind, name = files.kind(), repr(str(files.location))
        if kind != "folder":
            reason = (
                "a file; name the folder"
                if kind == "file"
                else "not there; `qgate collect` makes one"
            )
            raise QgateError(f"the dump {name} is {reason}.")
        manifest = read_manifest(files)
        if manifest is not None:
            return Dump(files, manifest)
        saved: Dump | None = _tensor_saver.opened(files)
        if saved is not None:
            return saved
        raise QgateError(
            f"{name} is no dump: it has no dump.json, and no .pt files of megatron-tensor-saver."
        )

    def __repr__(self) -> str:
        # Nothing is read: a dump may lie in a store, and a debugger shows it at every step.
        return f"{self._title()}: .records() lists its tensors"

    def _title(self) -> str:
        return f"Dump {shortened(self.folder, 90)!r} of {counted(self.world_size, 'rank')}"

    def overview(self) -> Overview:
        """Describe the dump: its ranks, what is missing, and its tensors, the largest first."""
        states = self.states
        count = sum(state.records for state in states)
        title = f"{self._title()}: {counted(count, 'tensor')}"
        largest = sorted(self.records(), key=_largest_first)
        return Overview(title, largest, _record_row, "tensor", self.notes(states)[:5], "amax")

    @property
    def world_size(self) -> int:
        return self.manifest.world_size

    @property
    def ranks(self) -> list[int]:
        """List the ranks that have written in this run; an earlier run may have left others."""
        folders = self.folders
        self._read_ahead(folders)
        return [rank for rank in folders if self.has(rank)]

    @property
    def folders(self) -> list[int]:
        """List the ranks that have a folder, of any run, without reading their indexes."""
        return list(ranks_in(self.files))

    def has(self, rank: int) -> bool:
        """Tell whether a rank has written in this run."""
        return self._read(rank).lines.is_of(self.manifest.run)

    def events(self, rank: int) -> list[dict[str, object]]:
        """Return the times at which a rank began to write and ended, from its index."""
        return self._read(rank).lines.events

    def _expected(self) -> Sequence[int]:
        """Return the ranks that ought to have written something."""
        return range(self.world_size)

    def state(self, rank: int) -> RankState:
        index, home = self._read(rank), self._home(rank)
        lines = index.lines
        events = [event.get(EVENT) for event in lines.events]
        closing = lines.events[-1] if events and events[-1] == "close" else {}
        listed = closing.get("missing")
        missing = tuple(map(str, listed)) if isinstance(listed, list) else ()
        count = closing.get("missing_count", 0)
        count = count if isinstance(count, int) else len(missing)
        torn = [*lines.damaged]
        if lines.torn:
            torn.append(f"{home.at(INDEX)}: its last line is torn ({lines.torn} bytes)")
        state: State = "running or killed"
        if closing:
            state = "incomplete" if count else "complete"
        return RankState(
            rank,
            state,
            index.count,
            missing,
            count,
            tuple(torn),
            tuple(lines.damaged),
            tuple(unfinished_in(home)),
            max(0, events.count("open") - events.count("close") - (not closing)),
        )

    @property
    def states(self) -> list[RankState]:
        return [self.state(rank) for rank in self.ranks]

    def notes(self, states: Sequence[RankState] | None = None) -> list[str]:
        """List what is missing, torn, unfinished or skipped; `states`, if given, are not read."""
        states = self.states if states is None else states
        notes = [note for state in states for note in state.notes()]
        read = {state.rank for state in states}
        stale = sorted(set(self.folders) - read) if self.manifest.run else []
        notes += [f"rank {rank} is left from another run: it is not read" for rank in stale]
        absent = [rank for rank in self._expected() if rank not in read]
        if absent:
            listed = ", ".join(map(str, absent[:20]))
            notes.append(f"of {self.world_size} ranks these have written nothing: {listed}")
        return [*notes, *(f"skipped {text}" for text in self.skipped)]

    def records(self, **fields: object) -> Iterator[Record]:
        """Select records by their fields, in the order of execution, rank after rank.

        A field takes a value, a pattern such as `grad_*`, or several: `rank=[0, 1]`.
        """
        selection = RecordSelection(fields)
        ranks = [rank for rank in self.folders if selection.allows("rank", rank)]
        self._read_ahead(ranks)
        for rank in filter(self.has, ranks):
            yield from filter(selection.matches, self.records_of(rank))

    def tensor(self, record: Record, *, check: bool = True) -> Tensor:
        """Map the values of a record from the file; `check` proves them by their hash."""
        return self._shard(record.rank).tensor(record, check=check)

    def counts(self, record: Record, *, check: bool = True) -> dict[str, np.ndarray[Any, Any]]:
        return self._shard(record.rank).counts(record, check=check)

    def beginning(self, record: Record, elements: int) -> Tensor:
        """Return the first elements of the values, flat, without proving their hash."""
        return self._shard(record.rank).beginning(record, elements)

    def shard(self, record: Record) -> locations.Location | None:
        """Return the file that the values of a record are in."""
        values = record.tensor or record.counts
        return None if values is None else self._shard(record.rank).path(values)

    def _shard(self, rank: int) -> ShardReader:
        """Return the reader of a rank's shards; the most recently used ones stay open."""
        with self._lock:
            reader = self._shards.pop(rank, None)
            if reader is not None:
                self._shards[rank] = reader
                return reader
        home = self._home(rank)
        if home.kind() != "folder":
            raise unknown("rank of the dump", rank, map(str, self.ranks))
        with self._lock:
            reader = self._shards.setdefault(rank, ShardReader(self.files, home))
            while len(self._shards) > _RANKS_OPEN:
                del self._shards[next(iter(self._shards))]
        return reader

    def _home(self, rank: int) -> Folder:
        if rank not in self._homes:
            self._homes[rank] = self.files.inside(rank_name(rank))
        return self._homes[rank]

    def _read_ahead(self, ranks: list[int]) -> None:
        """Read several indexes of a store at a time."""
        unread = [rank for rank in ranks if rank not in self._indexes]
        threads = min(self.files.parallel_reads, len(unread))
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(self._read, unread))

    def records_of(self, rank: int) -> list[Record]:
        """Return all records of one rank, in the order of execution."""
        records = self._read(rank).records
        return self._read(rank, anew=True).records or [] if records is None else records

    def _read(self, rank: int, *, anew: bool = False) -> _RankIndex:
        """Return the index of a rank; it is read again when it has grown."""
        file = Index(self._home(rank))
        now = file.stamp()
        index = self._indexes.get(rank)
        if index is None or index.stamp != now or anew:
            lines = file.read()
            records = sorted(lines.records, key=lambda record: record.order)
            index = _RankIndex(now, replace(lines, records=[]), len(records), records)
            with self._lock:
                self._indexes.pop(rank, None)
                self._indexes[rank] = index
                self._forget(rank)
        return index

    def _forget(self, latest: int) -> None:
        """Forget the records of ranks that were read earliest, as far as there are too many."""
        counts = {
            rank: len(index.records) for rank, index in self._indexes.items() if index.records
        }
        too_many = sum(counts.values()) - _MOST_RECORDS
        for rank, count in counts.items():
            if too_many > 0 and rank != latest:
                self._indexes[rank].records = None
                too_many -= count


def _largest_first(record: Record) -> tuple[bool, float]:
    return not any(record.nonfinite.values()), -record.stats.get("amax", 0.0)


def _record_row(record: Record) -> dict[str, object]:
    return {
        "tensor": record.title,
        "dtype": record.dtype,
        "shape": "×".join(map(str, record.shape)),
        "not finite": sum(record.nonfinite.values()),
        **{name: record.stats.get(name) for name in ("amax", "mean", "std")},
    }
