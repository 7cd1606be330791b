"""Reading a dump, also one that is still being written or whose writer was killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from qgate.dumps.index import EVENT, Index, Lines
from qgate.dumps.layout import INDEX, About, rank_name, ranks_in, read_about, unfinished_in
from qgate.dumps.records import Record
from qgate.dumps.selecting import check_fields, fits, is_wanted
from qgate.dumps.shard_reading import ShardReader
from qgate.errors import QgateError, unknown
from qgate.storage import places
from qgate.storage.folders import Folder, Stamp
from qgate.storage.opening import folder_of

_RANKS_OPEN = 16
_MOST_HELD = 20_000
"""Records that a dump keeps of ranks it has read: what many ranks wrote is read again instead."""
State = Literal["complete", "incomplete", "running or killed", "not told"]


@dataclass
class _Index:
    """The index of a rank as it was read; `records` may be forgotten, and is read again then."""

    stamp: tuple[Stamp | None, ...]
    lines: Lines
    count: int
    records: list[Record] | None


@dataclass(frozen=True)
class RankState:
    """How far the writing of one rank has come.

    state        incomplete: closed, and something is missing; not told: by the known collector
    missing      what could not be written, the first of `missing_count`
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
        """What a reader should know beside the records; nothing where all is well."""
        said = []
        if self.state == "running or killed":
            said.append("it was not closed: its writer is at work or was killed")
        if self.missing_count:
            several = self.missing_count > 1
            said.append(f"{self.missing_count} are missing: " if several else "missing: ")
            said[-1] += f"{self.missing[0]}{', …' if several else ''}"
        if self.cut_off:
            said.append(f"{self.cut_off} earlier sessions were cut off")
        said += [*self.torn, *(f"{name} is not finished" for name in self.unfinished)]
        return [f"rank {self.rank}: {each}" for each in said]


class Dump:
    """The records of a dump and their tensors. `Dump.open` reads what there is now.

    A dump of this machine is looked at again whenever it is asked; one in a store of objects is
    what was there at first, and opened again to see more.

    folder    its path or URL
    header    settings of whoever collected
    skipped   files that are no part of it, each with a reason
    damaged   those among them that were a part of it: torn, empty
    """

    openers: ClassVar[list[Callable[[Folder], Dump | None]]] = []
    """Open folders of other programs, each those of one; None is a folder that is not its."""

    def __init__(self, files: Folder, about: About) -> None:
        self.files, self.about = files, about
        self.folder: places.Place = files.place
        self.header: dict[str, Any] = about.header
        self.skipped: list[str] = []
        self.damaged: list[str] = []
        self._homes: dict[int, Folder] = {}
        self._indexes: dict[int, _Index] = {}
        self._lock = Lock()
        self._shards: dict[int, ShardReader] = {}

    @classmethod
    def open(cls, folder: places.Place | str) -> Dump:
        """A dump of qgate, or a folder of the known collector as it is; by its path or URL."""
        files = folder_of(folder)
        kind, shown = files.kind(), repr(str(files.place))
        if kind != "folder":
            what = "a file; name the folder" if kind == "file" else "not there"
            raise QgateError(f"the dump {shown} is {what}.")
        about = read_about(files)
        if about is not None:
            return Dump(files, about)
        for opened in (opener(files) for opener in cls.openers):
            if opened is not None:
                return opened
        raise QgateError(
            f"{shown} is no dump: it has no dump.json, and no .pt files of the known collector."
        )

    @property
    def world_size(self) -> int:
        return self.about.world_size

    @property
    def ranks(self) -> list[int]:
        """Those that have written; without what an earlier run has left of others."""
        found = self.folders
        self._read_ahead(found)
        return [rank for rank in found if self.has(rank)]

    @property
    def folders(self) -> list[int]:
        """Ranks that have a folder, of whichever run; nothing is read to know them."""
        return list(ranks_in(self.files))

    def has(self, rank: int) -> bool:
        """Whether a rank has written in this run."""
        return self._read(rank).lines.is_of(self.about.run)

    def events(self, rank: int) -> list[dict[str, Any]]:
        """When a rank began to write and when it ended, as it was told."""
        return self._read(rank).lines.events

    @property
    def absent_ranks(self) -> list[int]:
        there = set(self.ranks)
        return [rank for rank in self._expected() if rank not in there]

    def _expected(self) -> Sequence[int]:
        """Ranks that ought to have written something."""
        return range(self.world_size)

    def state(self, rank: int) -> RankState:
        index = self._read(rank)
        lines = index.lines
        events = [each.get(EVENT) for each in lines.events]
        closing = lines.events[-1] if events and events[-1] == "close" else None
        told = (closing or {}).get("missing")
        missing = tuple(map(str, told)) if isinstance(told, list) else ()
        count = (closing or {}).get("missing_count", 0)
        count = count if isinstance(count, int) else len(missing)
        cut = events.count("open") - events.count("close") - (0 if closing else 1)
        home = self._home(rank)
        torn = [*lines.damaged]
        if lines.torn:
            torn.append(f"{home.at(INDEX)}: its last line is torn ({lines.torn} bytes)")
        found: State = "running or killed"
        if closing is not None:
            found = "incomplete" if count else "complete"
        return RankState(
            rank,
            found,
            index.count,
            missing,
            count,
            tuple(torn),
            tuple(lines.damaged),
            tuple(unfinished_in(home)),
            max(0, cut),
        )

    @property
    def states(self) -> list[RankState]:
        return [self.state(rank) for rank in self.ranks]

    def notes(self, states: Sequence[RankState] | None = None) -> list[str]:
        """What is missing, torn, unfinished or skipped; `states` of whoever has read them."""
        states = self.states if states is None else states
        said = [note for state in states for note in state.notes()]
        read = {state.rank for state in states}
        left = sorted(set(self.folders) - read) if self.about.run else []
        said += [f"rank {rank} is left from another run: it is not read" for rank in left]
        absent = [rank for rank in self._expected() if rank not in read]
        if absent:
            listed = ", ".join(map(str, absent[:20]))
            said.append(f"of {self.world_size} ranks these have written nothing: {listed}")
        return [*said, *(f"skipped {each}" for each in self.skipped)]

    def records(self, **wanted: object) -> Iterator[Record]:
        """In the order of execution, rank after rank; only those wanted.

        A field is given a value, a pattern such as `grad_*`, or several: `rank=[0, 1]`.
        """
        asked = check_fields(wanted)
        ranks = [rank for rank in ranks_in(self.files) if fits(asked, "rank", rank)]
        self._read_ahead(ranks)
        for rank in filter(self.has, ranks):
            for record in self.records_of(rank):
                if is_wanted(record, asked):
                    yield record

    def tensor(self, record: Record, *, check: bool = True) -> Tensor:
        """The values, mapped from the file; `check` proves by their hash that they are those."""
        return self._shard(record.rank).tensor(record, check=check)

    def counts(self, record: Record, *, check: bool = True) -> dict[str, np.ndarray[Any, Any]]:
        return self._shard(record.rank).counts(record, check=check)

    def beginning(self, record: Record, elements: int) -> Tensor:
        """The first elements of the values, flat; not proved by their hash."""
        return self._shard(record.rank).beginning(record, elements)

    def shard(self, record: Record) -> places.Place | None:
        """The file that the values of a record are in."""
        place = record.tensor or record.counts
        return None if place is None else self._shard(record.rank).path(place)

    def _shard(self, rank: int) -> ShardReader:
        """Those of ranks that were read last stay open."""
        with self._lock:
            found = self._shards.pop(rank, None)
            if found is not None:
                self._shards[rank] = found
                return found
        home = self._home(rank)
        if home.kind() != "folder":
            raise unknown("rank of the dump", rank, map(str, self.ranks))
        with self._lock:
            found = self._shards.setdefault(rank, ShardReader(self.files, home))
            while len(self._shards) > _RANKS_OPEN:
                del self._shards[next(iter(self._shards))]
        return found

    def _home(self, rank: int) -> Folder:
        if rank not in self._homes:
            self._homes[rank] = self.files.inside(rank_name(rank))
        return self._homes[rank]

    def _read_ahead(self, ranks: list[int]) -> None:
        """Read several indexes of a store at a time."""
        new = [rank for rank in ranks if rank not in self._indexes]
        threads = min(self.files.parallel_reads, len(new))
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(self._read, new))

    def records_of(self, rank: int) -> list[Record]:
        """All of one rank, in the order of execution."""
        records = self._read(rank).records
        return self._read(rank, anew=True).records or [] if records is None else records

    def _read(self, rank: int, *, anew: bool = False) -> _Index:
        """The index as it is now; read again when it has grown."""
        index = Index(self._home(rank))
        now = index.stamp()
        known = self._indexes.get(rank)
        if known is None or known.stamp != now or anew:
            lines = index.read()
            records = sorted(lines.records, key=lambda record: record.order)
            known = _Index(now, replace(lines, records=[]), len(records), records)
            with self._lock:
                self._indexes.pop(rank, None)
                self._indexes[rank] = known
                self._forget(rank)
        return known

    def _forget(self, but: int) -> None:
        """Records of ranks that were read long ago, as far as there are too many."""
        held = {rank: len(each.records) for rank, each in self._indexes.items() if each.records}
        too_many = sum(held.values()) - _MOST_HELD
        for rank, count in held.items():
            if too_many > 0 and rank != but:
                self._indexes[rank].records = None
                too_many -= count
