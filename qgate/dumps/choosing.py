"""Choose the records of dumps to look at, without holding them, and parts of them to send."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from qgate.dumps import Dump, Record, Seen, check_fields, is_wanted
from qgate.errors import QgateError
from qgate.storage import places

_TOGETHER = 32 << 20
_MOST_TOGETHER = 16
T = TypeVar("T")


class Located(NamedTuple):
    """A record and the dump that it is of."""

    folder: places.Place
    record: Record

    @property
    def key(self) -> tuple[places.Place, int, int]:
        return self.folder, self.record.rank, self.record.order


@dataclass
class ChosenRecords:
    """The records that are asked for and say something of floating point values.

    They are read anew whenever they are passed over, so what is held of them does not grow.

    of       how many there are, before `most` evenly spaced ones are taken
    labels   how many have which quant type
    lost     keys of those that could not be looked at; they are passed over from then on
    ends     the last of each rank when it was chosen: what is written later is not looked at
    """

    dumps: Sequence[Dump]
    wanted: dict[str, tuple[object, ...]]
    most: int | None = None
    of: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    lost: set[tuple[places.Place, int, int]] = field(default_factory=set)
    ends: dict[tuple[places.Place, int], int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.of if self.most is None else min(self.of, self.most)

    def __iter__(self) -> Iterator[Located]:
        found = (Located(dump.folder, record) for dump in self.dumps for record in dump.records())
        thinned = self._thinned(filter(self._is_one, found))
        return (place for place in thinned if place.key not in self.lost)

    def by_rank(self) -> Iterator[list[Located]]:
        """Rank after rank, of all dumps; all at once where there are only few."""
        if self.count < self.of:
            yield list(self)
            return
        for rank in sorted({rank for dump in self.dumps for rank in dump.ranks}):
            found = (
                Located(dump.folder, record)
                for dump in self.dumps
                if dump.has(rank)
                for record in dump.records_of(rank)
            )
            yield [p for p in found if self._is_one(p) and p.key not in self.lost]

    def _is_one(self, place: Located) -> bool:
        record = place.record
        last = self.ends.get((place.folder, record.rank), -1)
        return record.order <= last and is_wanted(record, self.wanted) and says_something(record)

    def _thinned(self, found: Iterator[Located]) -> Iterator[Located]:
        if self.count == self.of:
            yield from found
            return
        taken = 0
        for number, place in enumerate(found):
            if taken < self.count and number == taken * self.of // self.count:
                taken += 1
                yield place


def choose(dumps: Sequence[Dump], wanted: Mapping[str, object], most: int | None) -> ChosenRecords:
    """What there is to look at, and notes on what is not looked at."""
    chosen = ChosenRecords(dumps, check_fields(wanted), most)
    seen = Seen(chosen.wanted)
    records = found = 0
    left: list[Record] = []
    for folder, record in ((dump.folder, record) for dump in dumps for record in dump.records()):
        end = folder, record.rank
        chosen.ends[end] = max(record.order, chosen.ends.get(end, record.order))
        records += 1
        seen.add(record)
        if not is_wanted(record, chosen.wanted):
            continue
        found += 1
        if says_something(record):
            chosen.of += 1
            chosen.labels[record.quant_type] += 1
        else:
            left = [*left, record][:1]
    where = " and ".join(repr(str(dump.folder)) for dump in dumps)
    if not records:
        notes = [note for dump in dumps for note in dump.notes()] or ["none was written"]
        raise QgateError(f"{where} holds no records: {notes[0]}.")
    seen.check()
    if not found:
        told = ", ".join(f"{name} {value}" for name, value in wanted.items())
        raise QgateError(f"no record of {where} has all of {told}.")
    if left:
        chosen.notes.append(
            f"{found - chosen.of} tensors are left out, empty or without floating point numbers: "
            f"{left[0].title} is {left[0].dtype} {list(left[0].shape)}"
        )
    if chosen.count < chosen.of:
        chosen.labels = Counter(place.record.quant_type for place in chosen)
        said = f"{chosen.count} of {chosen.of} tensors were looked at, evenly spaced"
        chosen.notes.append(said)
    return chosen


def says_something(record: Record) -> bool:
    return record.elements > 0 and record.dtype.startswith(("float", "bfloat"))


@functools.lru_cache(maxsize=4)
def opened(folder: places.Place) -> Dump:
    """A dump that this process has open; its index is read once."""
    return Dump.open(folder)


def together(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Neighbors, as many as make it worth sending them to a process; fixed by the items alone."""
    part: list[T] = []
    total = 0
    for item in items:
        if part and (total + size(item) > _TOGETHER or len(part) >= _MOST_TOGETHER):
            yield part
            part, total = [], 0
        part.append(item)
        total += size(item)
    if part:
        yield part
