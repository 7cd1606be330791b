"""One look at each tensor of dumps: its portrait, and the pool that it belongs to."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast

from torch import Tensor

from qgate import urls
from qgate.analysis.portraits.pools import (
    Pool,
    channels_of,
    pool_of,
    pool_of_counts,
    pool_of_statistics,
)
from qgate.dumps import Dump, Record, Seen, check_fields, is_wanted
from qgate.dumps.summing import nbytes
from qgate.errors import QgateError
from qgate.pipeline.dumps.shown import Located, Shown
from qgate.results.portraits import TensorPortrait
from qgate.results.rows import packed
from qgate.stats import serial

_TOGETHER = 32 << 20
_MOST_TOGETHER = 16
Group = tuple[str, str, str, str, str]
T = TypeVar("T")


@dataclass(frozen=True)
class Glance:
    """How much of each tensor is looked at; see `Asked`."""

    formats: tuple[str, ...]
    rows: int
    most: int | None
    seed: int


@dataclass(frozen=True)
class Batch:
    """Neighbors that one process looks at."""

    places: tuple[Located, ...]
    glance: Glance


@dataclass
class Looked:
    """What was found in a batch, tensors packed as rows; one that cannot be read is a note."""

    tensors: list[bytes] = field(default_factory=list)
    shown: Shown = field(default_factory=Shown)
    pools: dict[Group, Pool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Chosen:
    """The records that are asked for and say something of floating point values.

    They are read anew whenever they are passed over, so what is held of them does not grow.

    of       how many there are, before `most` evenly spaced ones are taken
    labels   how many have which quant type
    """

    dumps: Sequence[Dump]
    wanted: dict[str, tuple[object, ...]]
    most: int | None = None
    of: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.of if self.most is None else min(self.of, self.most)

    def __iter__(self) -> Iterator[Located]:
        found = (Located(dump.folder, record) for dump in self.dumps for record in dump.records())
        return self._thinned(place for place in found if self._is_one(place.record))

    def by_rank(self) -> Iterator[list[Located]]:
        """Rank after rank, of all dumps; all at once where there are only few."""
        if self.count < self.of:
            yield list(self)
            return
        for rank in sorted({rank for dump in self.dumps for rank in dump.ranks}):
            yield [
                Located(dump.folder, record)
                for dump in self.dumps
                if dump.has(rank)
                for record in dump.records_of(rank)
                if self._is_one(record)
            ]

    def _is_one(self, record: Record) -> bool:
        return is_wanted(record, self.wanted) and says_something(record)

    def _thinned(self, found: Iterator[Located]) -> Iterator[Located]:
        if self.count == self.of:
            yield from found
            return
        taken = 0
        for number, place in enumerate(found):
            if taken < self.count and number == taken * self.of // self.count:
                taken += 1
                yield place


def choose(dumps: Sequence[Dump], wanted: Mapping[str, object], most: int | None) -> Chosen:
    """What there is to look at, and notes on what is not looked at."""
    chosen = Chosen(dumps, check_fields(wanted), most)
    seen = Seen(chosen.wanted)
    records = found = 0
    left: list[Record] = []
    for record in (record for dump in dumps for record in dump.records()):
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
        said = f"{chosen.count} of {chosen.of} tensors were looked at, evenly spaced"
        chosen.notes.append(said)
    return chosen


def says_something(record: Record) -> bool:
    return record.elements > 0 and record.dtype.startswith(("float", "bfloat"))


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


def batches(places: Iterable[Located], glance: Glance) -> Iterator[Batch]:
    """What one process looks at, part by part."""
    for part in together(places, lambda place: nbytes(place.record)):
        yield Batch(tuple(part), glance)


@functools.lru_cache(maxsize=4)
def opened(folder: urls.Place) -> Dump:
    """A dump that this process has open; its index is read once."""
    return Dump.open(folder)


def look(batch: Batch) -> Looked:
    """In one thread: several processes of several threads each are in each other's way."""
    with serial():
        return _looked(batch)


def _looked(batch: Batch) -> Looked:
    found = Looked()
    for place in batch.places:
        try:
            pool, channels = _pool(place, batch.glance)
        except QgateError as error:
            found.notes.append(f"left out: {error}")
            continue
        portrait = {**_identity(place.record), **pool.portrait()}
        if channels is not None:
            portrait["channels"] = channels
        tensor = cast(TensorPortrait, portrait)
        found.tensors.append(packed(tensor))
        found.shown.add(place, tensor)
        group = _group_of(place.record, pool)
        found.pools[group] = found.pools[group] + pool if group in found.pools else pool
    return found


def _pool(place: Located, glance: Glance) -> tuple[Pool, Any]:
    record = place.record
    if record.tensor is None:
        return pool_of_summary(opened(place.folder), record, glance.formats), None
    values = values_of(place, glance.most)
    pool = pool_of(values, formats=glance.formats, rows=glance.rows, seed=glance.seed)
    if values.numel() < record.elements:
        pool = replace(pool, elements=record.elements)
    return pool, channels_of(values) if values.dim() > 1 else None


def pool_of_summary(dump: Dump, record: Record, names: Sequence[str] = ()) -> Pool:
    """A tensor whose values were not kept: from its counts, or from its statistics alone."""
    told = dict(record.nonfinite)
    if record.counts is None:
        return pool_of_statistics(record.stats, told, record.elements)
    kept = dump.counts(record)
    return pool_of_counts(
        kept["patterns"],
        kept["counts"],
        str(record.extra.get("counted_as") or record.dtype),
        record.stats,
        told,
        record.elements,
        formats=names,
        dtype=record.dtype,
    )


def values_of(place: Located, most: int | None = None) -> Tensor:
    """The values of a record; of a large one the first rows, where only some are looked at."""
    dump, record = opened(place.folder), place.record
    if most is None or record.elements <= most:
        return dump.tensor(record, check=most is None)
    width = record.shape[-1] if len(record.shape) > 1 else 1
    flat = dump.beginning(record, max(1, most // width) * width)
    return flat.reshape(-1, width) if len(record.shape) > 1 else flat


def _identity(record: Record) -> dict[str, Any]:
    names = TensorPortrait.__annotations__.keys() & {each.name for each in fields(record)}
    told = {name: getattr(record, name) for name in names}
    return {"title": record.title, **told, "shape": list(record.shape)}


def _group_of(record: Record, pool: Pool) -> Group:
    return (
        record.quant_type,
        record.layer_type,
        record.operation,
        record.name,
        pool.counted_as,
    )
