"""Prove every tensor of a dump by its hash, in this process or by several workers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from qgate.dumps.choosing import nbytes, open_cached
from qgate.dumps.layout import rank_name, shards_in
from qgate.dumps.reading import Dump, RankState
from qgate.dumps.record import StoredValues
from qgate.engine import Failure, Workers, map_items
from qgate.errors import QgateError
from qgate.storage import locations

_SLICE_RECORDS, _SLICE_BYTES = 256, 256 << 20
Step = Callable[[int, int], None]


@dataclass(frozen=True)
class RankCheck:
    """Findings in the index of a rank, and the slices in which its values are proved.

    slices    numbers of neighboring records that are one piece of work: few, or of few bytes
    hashed    records whose tensors and whose counts have a hash
    damaged   problems of the index
    unnamed   shards that no record names, as a killed writer leaves them
    """

    state: RankState
    slices: tuple[int, ...]
    hashed: dict[str, int]
    damaged: tuple[str, ...]
    unnamed: tuple[str, ...]


@dataclass(frozen=True)
class RankSlice:
    """Neighboring records of a rank."""

    folder: locations.Location
    rank: int
    start: int = 0
    stop: int | None = None


@dataclass
class Verification:
    """Proof of the values of a dump. Records stay with the workers; a rank takes a few lines here.

    hashed   tensors and counts that have a hash
    """

    folder: locations.Location
    workers: Workers | int = 1
    ranks: list[RankCheck] = field(default_factory=list)

    @property
    def records(self) -> int:
        return sum(check.state.records for check in self.ranks)

    @property
    def hashed(self) -> dict[str, int]:
        kinds = ("tensors", "counts")
        return {kind: sum(check.hashed.get(kind, 0) for check in self.ranks) for kind in kinds}

    def problems(self, step: Step = lambda _done, _total: None) -> Iterator[str]:
        """List damage, each once, in the order of ranks and records; `step` counts records.

        A slice whose process ended is a problem too: its values were not proved.
        """
        reported: set[str] = set()
        for text in self._problems(step):
            if text not in reported:
                reported.add(text)
                yield text

    def notes(self) -> list[str]:
        """List notes for a reader of the dump, beside its problems."""
        dump = open_cached(self.folder)
        notes = dump.notes([check.state for check in self.ranks])
        bad = [*dump.damaged, *(text for check in self.ranks for text in check.state.damaged)]
        unnamed_shards = [name for check in self.ranks for name in check.unnamed]
        good = [note for note in notes if not any(text in note for text in bad)]
        return [*good, *(f"{name}: no record names it" for name in unnamed_shards)]

    def _problems(self, step: Step) -> Iterator[str]:
        open_cached.cache_clear()  # the dump may have been written anew
        self.ranks.clear()
        dump = open_cached(self.folder)
        yield from (f"{self.folder}: {text}" for text in dump.damaged)
        ranks = [RankSlice(self.folder, rank) for rank in dump.folders]
        for part, check in zip(ranks, map_items(_check_rank, ranks, self.workers), strict=True):
            if isinstance(check, Failure):
                yield f"{self.folder}: rank {part.rank} was not proved: {check.reason}"
            elif check is not None:
                self.ranks.append(check)
                yield from check.damaged
        slices = [
            RankSlice(self.folder, check.state.rank, stop - count, stop)
            for check in self.ranks
            for count, stop in zip(check.slices, itertools.accumulate(check.slices), strict=True)
        ]
        done, total = 0, self.records
        for part, problems in zip(slices, map_items(_prove, slices, self.workers), strict=True):
            stop = part.stop or 0
            if isinstance(problems, Failure):
                records = f"records {part.start} to {stop - 1} of rank {part.rank}"
                yield f"{self.folder}: {records} were not proved: {problems.reason}"
            else:
                yield from problems
            done += stop - part.start
            step(done, total)


def problems(dump: Dump) -> Iterator[str]:
    """List the damage of a dump, each once; records that were never written are no damage."""
    checks = [_index_check(dump, rank) for rank in dump.ranks]
    damage = [f"{dump.folder}: {text}" for text in dump.damaged]
    damage += [text for check in checks for text in check.damaged]
    damage += [text for check in checks for text in _damaged_values(dump, check.state.rank)]
    return iter(dict.fromkeys(damage))


def unnamed(dump: Dump) -> list[str]:
    """List the shards that no record names."""
    return [name for rank in dump.ranks for name in _index_check(dump, rank).unnamed]


def _check_rank(part: RankSlice) -> RankCheck | None:
    """Check the index of a rank; None for a rank of an earlier run."""
    dump = open_cached(part.folder)
    return _index_check(dump, part.rank) if dump.has(part.rank) else None


def _index_check(dump: Dump, rank: int) -> RankCheck:
    orders: Counter[int] = Counter()
    hashed: Counter[str] = Counter()
    named: set[str] = set()
    slices, size = [0], 0
    for record in dump.records_of(rank):
        if slices[-1] and (slices[-1] >= _SLICE_RECORDS or size + nbytes(record) > _SLICE_BYTES):
            slices.append(0)
            size = 0
        slices[-1] += 1
        size += nbytes(record)
        orders[record.order] += 1
        for kind, stored in (("tensors", record.tensor), ("counts", record.counts)):
            if stored is not None:
                named.add(stored.file)
                hashed[kind] += bool(stored.digest)
    state = dump.state(rank)
    duplicates = [
        f"{dump.folder}: rank {rank} has order {order} {times} times"
        for order, times in orders.items()
        if times > 1
    ]
    home = dump.files.inside(rank_name(rank))
    shards = shards_in(home).values() if home.kind() == "folder" else ()
    unnamed_shards = tuple(str(home.at(name)) for name in shards if name not in named)
    damaged = (*state.damaged, *duplicates)
    return RankCheck(state, tuple(slices), dict(hashed), damaged, unnamed_shards)


def _prove(part: RankSlice) -> list[str]:
    return _damaged_values(open_cached(part.folder), part.rank, part.start, part.stop)


def _damaged_values(dump: Dump, rank: int, start: int = 0, stop: int | None = None) -> list[str]:
    """Read the values of records; values that several records share are read once."""
    problems: list[str] = []
    proved: set[tuple[StoredValues, tuple[int, ...], str]] = set()
    for record in dump.records_of(rank)[start:stop]:
        for stored, read in ((record.tensor, dump.tensor), (record.counts, dump.counts)):
            if stored is None or (stored, record.shape, record.dtype) in proved:
                continue
            try:
                read(record)
            except (QgateError, OSError) as error:
                problems.append(str(error))
            else:
                proved.add((stored, record.shape, record.dtype))
    return problems
