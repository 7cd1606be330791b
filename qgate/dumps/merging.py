"""Ranks of several folders put into one: shards are linked where they can be, or copied.

Each rank is put together by itself, by whoever is at hand; what one has to know of all of them does
not grow with their records. The dump appears when it is whole.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qgate.dumps.index import line
from qgate.dumps.known_files import KnownDump
from qgate.dumps.layout import (
    ABOUT,
    INDEX,
    RUN,
    About,
    rank_name,
    ranks_in,
    remove_rank,
    shard_name,
)
from qgate.dumps.reading import Dump
from qgate.dumps.records import Record, StoredValues
from qgate.dumps.writing import DumpWriter
from qgate.errors import QgateError
from qgate.storage import places
from qgate.storage.files import neighbor
from qgate.storage.folders import Folder, LocalFolder
from qgate.storage.opening import folder_of, writable_folder

_MOST_MISSING = 1000
_MARK = ".qgate-merge"


@dataclass(frozen=True)
class MergedDump:
    """What came together; `same` records were in several folders and are there once.

    `missing` are the first thousand of `missing_count`.
    """

    ranks: int = 0
    records: int = 0
    same: int = 0
    missing: tuple[str, ...] = ()
    missing_count: int = 0

    def __add__(self, other: MergedDump) -> MergedDump:
        return MergedDump(
            self.ranks + other.ranks,
            self.records + other.records,
            self.same + other.same,
            (self.missing + other.missing)[:_MOST_MISSING],
            self.missing_count + other.missing_count,
        )


@dataclass(frozen=True)
class RankPart:
    """A rank, the folders that may have it, which of them are of the known collector, and where it
    is put."""

    rank: int
    folders: tuple[places.Place, ...]
    known: tuple[bool, ...]
    output: places.Place


Each = Callable[[Callable[[RankPart], MergedDump], Sequence[RankPart]], MergedDump]


def _one_by_one(
    function: Callable[[RankPart], MergedDump], parts: Sequence[RankPart]
) -> MergedDump:
    return sum(map(function, parts), MergedDump())


def merge_dumps(
    folders: Sequence[places.Place | str], output: places.Place | str, each: Each = _one_by_one
) -> MergedDump:
    """One dump of many; two records of one rank and order clash. `each` is who does the ranks."""
    if not folders:
        raise QgateError("there are no dumps to put together.")
    with _appearing(writable_folder(output)) as part:
        about, parts = _planned([Dump.open(folder) for folder in folders], part)
        merged = each(merge_rank, parts)
        there = len(ranks_in(part.fresh()))
        if there != merged.ranks:
            raise QgateError(
                f"{merged.ranks} ranks were put together, and {there} of them are in "
                f"{str(part.place)!r}: those who work on them have to see the same folders."
            )
        part.put(ABOUT, about.to_text().encode())
    return merged


def _planned(dumps: Sequence[Dump], output: Folder) -> tuple[About, list[RankPart]]:
    ranks = [set(dump.ranks if _is_known(dump) else ranks_in(dump.files)) for dump in dumps]
    parts = []
    for rank in sorted({rank for each in ranks for rank in each}):
        having = [dump for dump, there in zip(dumps, ranks, strict=True) if rank in there]
        places, known = tuple(dump.folder for dump in having), tuple(map(_is_known, having))
        parts.append(RankPart(rank, places, known, output.place))
    return _about(dumps), parts


def _is_known(dump: Dump) -> bool:
    return isinstance(dump, KnownDump)


# The output -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _appearing(output: Folder) -> Iterator[Folder]:
    """A folder that is no dump before the end, and is gone if anything goes wrong."""
    names = output.names() if output.kind() == "folder" else {}
    if _MARK in names:
        raise QgateError(
            f"{str(output.place)!r} is being merged into, or has what a merge left that was "
            "killed: remove it, or choose another folder."
        )
    if names or output.kind() == "file":
        raise QgateError(f"{str(output.place)!r} is there already: choose another folder.")
    if output.path is not None and not output.path.name:
        raise QgateError(f"{str(output.place)!r} is where this runs: choose another folder.")
    with _marked(output) if output.path is None else _beside(output.path) as part:
        yield part


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Folder]:
    """A folder beside it, which becomes it at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with neighbor(path, folder=True) as part:
        yield LocalFolder(part)
        for left in part.glob(".*"):  # of a worker that was killed
            shutil.rmtree(left, ignore_errors=True)
        part.replace(path)


@contextlib.contextmanager
def _marked(output: Folder) -> Iterator[Folder]:
    """The folder itself, in a store: no dump without the object that is put last."""
    output.put(_MARK, b"\n", new=True)
    try:
        yield output
    except BaseException:
        with contextlib.suppress(Exception):
            now = output.fresh()
            for name in ranks_in(now).values():
                remove_rank(now.inside(name))
            now.remove(ABOUT, _MARK)
        raise
    with contextlib.suppress(OSError):
        output.remove(_MARK)


# What it is a dump of ---------------------------------------------------------------------------


def _about(dumps: Sequence[Dump]) -> About:
    """The settings that all have; those that differ are kept by folder."""
    first = dumps[0]
    for dump in dumps[1:]:
        sizes = (first.world_size, dump.world_size)
        if dump.about.run != first.about.run:
            raise QgateError(
                f"{str(dump.folder)!r} is of run {dump.about.run!r} and {str(first.folder)!r} of "
                f"{first.about.run!r}: only ranks of one run are put together."
            )
        if sizes[0] != sizes[1] and first.header.get("collector") != "known":
            raise QgateError(
                f"{str(dump.folder)!r} is of {sizes[1]} ranks and {str(first.folder)!r} of "
                f"{sizes[0]}: only ranks of one run are put together."
            )
    names = {name: None for dump in dumps for name in dump.header}
    shared = [name for name in names if all(_same(first, dump, name) for dump in dumps)]
    header: dict[str, Any] = {name: first.header[name] for name in shared if name != RUN}
    if first.about.run:
        header[RUN] = first.about.run
    if len(shared) < len(names):
        header["merged_from"] = [
            {n: v for n, v in dump.header.items() if n not in shared} for dump in dumps
        ]
    return About(max(dump.world_size for dump in dumps), header, created=_created(first))


def _same(first: Dump, dump: Dump, name: str) -> bool:
    missing = object()
    return bool(first.header.get(name, missing) == dump.header.get(name, missing))


def _created(dump: Dump) -> str:
    if not isinstance(dump, KnownDump):
        return dump.about.created
    return datetime.fromtimestamp(dump.began, UTC).isoformat(timespec="seconds")


# One rank ---------------------------------------------------------------------------------------


def merge_rank(part: RankPart) -> MergedDump:
    """Put a rank together; whoever does it again does the same, and takes nothing away.

    On this machine it is made under a name of its own, and gets the right one when it is whole.
    """
    output, name = folder_of(part.output), rank_name(part.rank)
    if output.path is None:
        return _merge_into(part, output.inside(name))
    made = output.path / f".{name}.{uuid.uuid4().hex}"
    made.mkdir()
    merged = _merge_into(part, LocalFolder(made))
    if not merged.ranks:
        made.rmdir()
        return merged
    try:
        made.rename(output.path / name)
    except OSError:
        if not (output.path / name).is_dir():
            raise
        shutil.rmtree(made)  # one that was taken for dead has done it
    return merged


def _merge_into(part: RankPart, home: Folder) -> MergedDump:
    with contextlib.ExitStack() as stack:
        sources = []
        for folder, known in zip(part.folders, part.known, strict=True):
            dump = _known(folder, str(part.output)) if known else Dump.open(folder)
            if dump.has(part.rank):
                shown = dump
                if known:
                    beside = home.path and home.path.parent
                    temporary = tempfile.TemporaryDirectory(dir=beside, prefix=".converted-")
                    shown = _converted(dump, part.rank, Path(stack.enter_context(temporary)))
                sources.append((shown, str(folder), dump.events(part.rank)))
        return _merge_rank(sources, part.rank, home) if sources else MergedDump()


@functools.lru_cache(maxsize=4)
def _known(folder: places.Place, output: str) -> Dump:  # noqa: ARG001
    """Read once by each process that works on one output: all files of the folder have to be."""
    return Dump.open(folder)


def _converted(dump: Dump, rank: int, made: Path) -> Dump:
    """A rank of a folder of the known collector, written as a dump."""
    with DumpWriter(made, rank=rank, world_size=dump.world_size, header=dump.header) as writer:
        for record in dump.records(rank=rank):
            writer.add(replace(record, tensor=None), dump.tensor(record))
        writer.close([f"{dump.folder}: {text}" for text in dump.damaged])
    return Dump.open(made)


def _merge_rank(
    sources: Sequence[tuple[Dump, str, list[dict[str, Any]]]], rank: int, home: Folder
) -> MergedDump:
    """Of dumps with the folders that they were given as, by which their user knows them, and with
    what was told of the writing."""
    chosen: dict[int, tuple[int, Record]] = {}
    same = 0
    for number, (dump, named, _) in enumerate(sources):
        for record in dump.records(rank=rank):
            other = chosen.setdefault(record.order, (number, record))
            if other[1] is record:
                continue
            if not _identical(other[1], record):
                raise QgateError(
                    f"{sources[other[0]][1]!r} and {named!r} both have order {record.order} of "
                    f"rank {rank}, {other[1].title} and {record.title}: they are no parts of one "
                    "run."
                )
            same += 1
    dumps = [dump for dump, _, _ in sources]
    shards = _Shards(home, dumps, rank)
    missing = [text for dump in dumps for text in _missing(dump, rank)]
    states = [dump.state(rank) for dump in dumps]
    count = len(missing) + sum(state.missing_count - len(state.missing) for state in states)
    times = sorted(
        str(event["time"]) for _, _, told in sources for event in told if "time" in event
    )
    began, ended = ({"time": times[i]} if times else {} for i in (0, -1))
    with home.writing(INDEX) as path, path.open("w", encoding="ascii") as file:
        file.write(line({"event": "open", **began, "run": dumps[0].about.run}))
        for order in sorted(chosen):
            file.write(line(shards.moved(*chosen[order]).to_dict()))
        told = {"missing": missing[:_MOST_MISSING], "missing_count": count}
        file.write(line({"event": "close", **ended, **told}))
    return MergedDump(1, len(chosen), same, tuple(missing[:_MOST_MISSING]), count)


def _identical(a: Record, b: Record) -> bool:
    """The same values in the same place of the run; where they are kept may differ."""
    if _hashes(a) != _hashes(b) or "" in _hashes(a):
        return False
    return replace(a, tensor=None, counts=None) == replace(b, tensor=None, counts=None)


def _hashes(record: Record) -> list[str | None]:
    places = (record.tensor, record.counts)
    return [None if place is None else place.digest for place in places]


def _missing(dump: Dump, rank: int) -> Iterator[str]:
    state = dump.state(rank)
    yield from state.missing
    if state.state == "running or killed":
        yield f"{dump.folder}: what came after {state.records} records, where it was cut off"
    yield from state.damaged


class _Shards:
    """Files of several dumps in the folder of one rank, under new numbers."""

    def __init__(self, home: Folder, dumps: Sequence[Dump], rank: int) -> None:
        self._home, self._dumps = home, dumps
        self._sources = [dump.files.inside(rank_name(rank)) for dump in dumps]
        self._names: dict[tuple[int, str], str] = {}

    def moved(self, number: int, record: Record) -> Record:
        return replace(
            record,
            tensor=self._place(number, record, record.tensor),
            counts=self._place(number, record, record.counts),
        )

    def _place(
        self, number: int, record: Record, place: StoredValues | None
    ) -> StoredValues | None:
        if place is None:
            return None
        source = number, place.file
        if source not in self._names:
            self._dumps[number].shard(replace(record, tensor=place, counts=None))  # refuses
            self._names[source] = shard_name(len(self._names))
            self._home.copy(self._sources[number], place.file, self._names[source])
        return replace(place, file=self._names[source])
