"""Whether a dump is what was written: every tensor by its hash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from qgate.dumps.layout import rank_name, shards_in
from qgate.dumps.reading import Dump, RankState
from qgate.dumps.records import Record, StoredValues
from qgate.dumps.summing import nbytes
from qgate.errors import QgateError

_MOST_TOGETHER, _MOST_BYTES = 256, 256 << 20


@dataclass(frozen=True)
class RankLook:
    """What is to be proved of a rank, and what its index alone tells.

    parts     numbers of neighboring records that are one piece of work: few, or of few bytes
    hashed    records whose tensors and whose counts have a hash
    damaged   what is wrong with the index
    unnamed   shards that no record names, as a writer leaves them that was killed in between
    """

    state: RankState
    parts: tuple[int, ...]
    hashed: dict[str, int]
    damaged: tuple[str, ...]
    unnamed: tuple[str, ...]


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
        yield from look_at(dump, rank).damaged


def look_at(dump: Dump, rank: int) -> RankLook:
    """One rank, without its values."""
    orders: Counter[int] = Counter()
    hashed: Counter[str] = Counter()
    named: set[str] = set()
    parts, size = [0], 0
    for record in dump.records(rank=rank):
        if parts[-1] and (parts[-1] >= _MOST_TOGETHER or size + nbytes(record) > _MOST_BYTES):
            parts.append(0)
            size = 0
        parts[-1] += 1
        size += nbytes(record)
        orders[record.order] += 1
        for what, place in (("tensors", record.tensor), ("counts", record.counts)):
            if place is not None:
                named.add(place.file)
                hashed[what] += bool(place.digest)
    state = dump.state(rank)
    twice = [
        f"{dump.folder}: rank {rank} has order {order} {times} times"
        for order, times in orders.items()
        if times > 1
    ]
    home = dump.files.inside(rank_name(rank))
    shards = shards_in(home).values() if home.kind() == "folder" else ()
    left = tuple(str(home.at(name)) for name in shards if name not in named)
    return RankLook(state, tuple(parts), dict(hashed), (*state.damaged, *twice), left)


def damage_in(dump: Dump, rank: int, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """What is wrong with the values of some records of a rank, counted as they stand there."""
    proved: set[tuple[StoredValues, tuple[int, ...], str]] = set()
    for record in dump.records_of(rank)[start:stop]:
        yield from _of_record(dump, record, proved)


def _of_record(
    dump: Dump, record: Record, proved: set[tuple[StoredValues, tuple[int, ...], str]]
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
    """Shards that no record names."""
    return [name for rank in dump.ranks for name in look_at(dump, rank).unnamed]
