"""Choose records of dumps, add them up and group them for workers, without holding them."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from qgate.dumps.reading import Dump
from qgate.dumps.record import DumpTotals, GroupTotals, Record, RecordSelection
from qgate.errors import QgateError
from qgate.storage import locations

_BATCH_BYTES = 32 << 20
_BATCH_ITEMS = 16
BY = ("layer_type", "operation", "name", "quant_type", "rank", "iteration")
T = TypeVar("T")


class LocatedRecord(NamedTuple):
    """A record, with the folder of its dump."""

    folder: locations.Location
    record: Record

    @property
    def key(self) -> tuple[locations.Location, int, int]:
        return self.folder, self.record.rank, self.record.order


@dataclass
class ChosenRecords:
    """Selected records of tensors with floating point values.

    Each iteration reads them again, so memory does not grow with them.

    total    number of them, before `most` evenly spaced ones are taken
    labels   number of records by quant type
    lost     keys of records that could not be read; later iterations leave them out
    ends     the last record of each rank at the time of choosing; later ones are left out
    """

    dumps: Sequence[Dump]
    selection: RecordSelection
    most: int | None = None
    total: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    lost: set[tuple[locations.Location, int, int]] = field(default_factory=set)
    ends: dict[tuple[locations.Location, int], int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.total if self.most is None else min(self.total, self.most)

    def __iter__(self) -> Iterator[LocatedRecord]:
        records = (
            LocatedRecord(dump.folder, record) for dump in self.dumps for record in dump.records()
        )
        picks = 0
        for number, located in enumerate(filter(self._is_chosen, records)):
            if self.count == self.total or (
                picks < self.count and number == picks * self.total // self.count
            ):
                picks += 1
                if located.key not in self.lost:
                    yield located

    def by_rank(self) -> Iterator[list[LocatedRecord]]:
        """Return the records rank after rank, of all dumps; all at once after thinning."""
        if self.count < self.total:
            yield list(self)
            return
        for rank in sorted({rank for dump in self.dumps for rank in dump.ranks}):
            records = (
                LocatedRecord(dump.folder, record)
                for dump in self.dumps
                if dump.has(rank)
                for record in dump.records_of(rank)
            )
            yield [p for p in records if self._is_chosen(p) and p.key not in self.lost]

    def _is_chosen(self, located: LocatedRecord) -> bool:
        record = located.record
        last = self.ends.get((located.folder, record.rank), -1)
        return record.order <= last and self.selection.matches(record) and has_floats(record)


def choose(dumps: Sequence[Dump], fields: Mapping[str, object], most: int | None) -> ChosenRecords:
    """Choose the records to analyze, with notes on the others."""
    selection = RecordSelection(fields)
    chosen = ChosenRecords(dumps, selection, most)
    records = 0
    unfit: Record | None = None
    for dump in dumps:
        for record in dump.records():
            end = dump.folder, record.rank
            chosen.ends[end] = max(record.order, chosen.ends.get(end, record.order))
            records += 1
            if not selection.count(record):
                continue
            if has_floats(record):
                chosen.total += 1
                chosen.labels[record.quant_type] += 1
            else:
                unfit = unfit or record
    folders = " and ".join(repr(str(dump.folder)) for dump in dumps)
    if not records:
        notes = [note for dump in dumps for note in dump.notes()] or ["none was written"]
        raise QgateError(f"{folders} holds no records: {notes[0]}.")
    selection.check(folders)
    if unfit is not None:
        chosen.notes.append(
            f"{selection.matching - chosen.total} tensors are left out, empty or without floating "
            f"point numbers: {unfit.title} is {unfit.dtype} {list(unfit.shape)}"
        )
    if chosen.count < chosen.total:
        chosen.labels = Counter(located.record.quant_type for located in chosen)
        chosen.notes.append(
            f"{chosen.count} of {chosen.total} tensors were looked at, evenly spaced"
        )
    return chosen


def has_floats(record: Record) -> bool:
    return record.elements > 0 and record.dtype.startswith(("float", "bfloat"))


@functools.lru_cache(maxsize=4)
def open_cached(folder: locations.Location) -> Dump:
    """Open a dump once in this process, so that its index is read once."""
    return Dump.open(folder)


def batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Group neighbors into batches worth a process; the items alone decide which."""
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and (total + size(item) > _BATCH_BYTES or len(batch) >= _BATCH_ITEMS):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch


# Adding up -------------------------------------------------------------------------------------


def nbytes(record: Record) -> int:
    """Return the bytes of the tensor in the model; 0 for a dtype that torch does not have."""
    dtype = getattr(torch, record.dtype, None)
    return record.elements * dtype.itemsize if isinstance(dtype, torch.dtype) else 0


def totals(dump: Dump) -> DumpTotals:
    """Count records and bytes, in all and by field; plain data."""
    groups: dict[str, dict[Any, list[int]]] = {name: defaultdict(lambda: [0, 0]) for name in BY}
    sums: Counter[str] = Counter()
    stored: dict[tuple[int, str, str], int] = {}
    for record in dump.records():
        size = nbytes(record)
        sums["records"] += 1
        sums["bytes"] += size
        sums["with_counts"] += record.counts is not None
        sums["with_nonfinite"] += any(record.nonfinite.values())
        if record.tensor is not None:
            sums["with_values"] += 1
            stored[record.rank, record.tensor.file, record.tensor.key] = size
        for name, group in groups.items():
            numbers = group[getattr(record, name)]
            numbers[0], numbers[1] = numbers[0] + 1, numbers[1] + size
    return {
        "folder": str(dump.folder),
        "qgate": dump.manifest.made_qgate,
        "created": dump.manifest.created,
        "world_size": dump.world_size,
        "header": dump.header,
        "records": sums["records"],
        "with_values": sums["with_values"],
        "with_counts": sums["with_counts"],
        "with_nonfinite": sums["with_nonfinite"],
        "bytes": sums["bytes"],
        "stored_bytes": sum(stored.values()),
        "states": {state.rank: state.state for state in dump.states},
        "by": {
            name: {
                "unknown" if key in (None, "") else str(key): {"records": n, "bytes": size}
                for key, (n, size) in sorted(
                    group.items(), key=lambda item: (item[0] is not None, item[0])
                )
            }
            for name, group in groups.items()
        },
        "notes": dump.notes(),
    }


def all_totals(dumps: Sequence[Dump]) -> DumpTotals:
    """Return the totals of one dump, or of several as if they were one.

    Each dump keeps its own ranks, also where their numbers are the same.
    """
    parts = [totals(dump) for dump in dumps]
    if len(parts) == 1:
        return parts[0]
    by: dict[str, dict[str, GroupTotals]] = {}
    for name in BY:
        group = by.setdefault(name, {})
        for key, numbers in (item for part in parts for item in part["by"][name].items()):
            sums = group.setdefault(key, {"records": 0, "bytes": 0})
            sums["records"] += numbers["records"]
            sums["bytes"] += numbers["bytes"]
    return {
        **parts[0],
        "folder": ", ".join(part["folder"] for part in parts),
        "records": sum(part["records"] for part in parts),
        "with_values": sum(part["with_values"] for part in parts),
        "with_counts": sum(part["with_counts"] for part in parts),
        "with_nonfinite": sum(part["with_nonfinite"] for part in parts),
        "bytes": sum(part["bytes"] for part in parts),
        "stored_bytes": sum(part["stored_bytes"] for part in parts),
        "world_size": max(part["world_size"] for part in parts),
        "notes": [f"{part['folder']}: {note}" for part in parts for note in part["notes"]],
        "states": {
            f"{number}/{rank}": state
            for number, part in enumerate(parts)
            for rank, state in part["states"].items()
        },
        "by": by,
    }
