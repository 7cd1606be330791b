"""Whether a dump is what was written: every tensor by its hash."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from qgate.dumps.layout import rank_name, shards_in
from qgate.dumps.reading import Dump
from qgate.dumps.records import Place, Record
from qgate.errors import QgateError


def problems(dump: Dump) -> Iterator[str]:
    """What is damaged, each once; nothing is said of what was never written."""
    parts = (damage(dump), *(damage_in(dump, rank) for rank in dump.ranks))
    return each_once(text for part in parts for text in part)


def each_once(texts: Iterable[str]) -> Iterator[str]:
    said: set[str] = set()
    for text in texts:
        if text not in said:
            said.add(text)
            yield text


def damage(dump: Dump) -> Iterator[str]:
    """What is wrong with the dump as a whole, and with its indexes."""
    yield from (f"{dump.folder}: {text}" for text in dump.damaged)
    for rank in dump.ranks:
        yield from dump.state(rank).damaged
        orders = Counter(record.order for record in dump.records(rank=rank))
        for order, times in orders.items():
            if times > 1:
                yield f"{dump.folder}: rank {rank} has order {order} {times} times"


def damage_in(dump: Dump, rank: int, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """What is wrong with the values of some records of a rank, counted as they stand there."""
    proved: set[tuple[Place, tuple[int, ...], str]] = set()
    for record in itertools.islice(dump.records(rank=rank), start, stop):
        yield from _of_record(dump, record, proved)


def _of_record(
    dump: Dump, record: Record, proved: set[tuple[Place, tuple[int, ...], str]]
) -> Iterator[str]:
    """Values that several records share are read once."""
    for place, read in ((record.tensor, dump.tensor), (record.counts, dump.counts)):
        if place is None or (place, record.shape, record.dtype) in proved:
            continue
        try:
            read(record)
        except (QgateError, OSError) as error:
            yield str(error)
        else:
            proved.add((place, record.shape, record.dtype))


def unnamed(dump: Dump) -> list[str]:
    """Shards that no record names, as a writer leaves them that was killed in between."""
    left = []
    for rank in dump.ranks:
        home = dump.files.inside(rank_name(rank))
        if home.kind() == "folder":
            named = {
                place.file
                for record in dump.records(rank=rank)
                for place in (record.tensor, record.counts)
                if place is not None
            }
            left += [str(home.at(name)) for name in shards_in(home).values() if name not in named]
    return left
