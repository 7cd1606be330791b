"""Ranks of several folders put into one: shards are linked where they can be, or copied."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
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
    rank_folder,
    shard_name,
)
from qgate.dumps.reading import Dump
from qgate.dumps.records import Place, Record
from qgate.dumps.writing import DumpWriter
from qgate.errors import QgateError


@dataclass(frozen=True)
class Merged:
    """What came together; `same` records were in several folders and are there once."""

    ranks: int
    records: int
    same: int
    missing: tuple[str, ...]


def merge_dumps(folders: Sequence[Path], output: Path) -> Merged:
    """One dump of many. It appears when it is whole; two records of one rank and order clash."""
    if not folders:
        raise QgateError("there are no dumps to put together.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise QgateError(f"{str(output)!r} is there already: choose another folder.")
    with _appearing(output) as part:
        dumps = [_as_dump(Dump.open(folder), part) for folder in folders]
        given = {id(dump): folder for dump, folder in zip(dumps, folders, strict=True)}
        about = _about(dumps)
        merged = Merged(0, 0, 0, ())
        for rank in sorted({rank for dump in dumps for rank in dump.ranks}):
            mine = [(dump, given[id(dump)]) for dump in dumps if rank in dump.ranks]
            found = _merge_rank(mine, rank, part)
            merged = Merged(
                merged.ranks + 1,
                merged.records + found.records,
                merged.same + found.same,
                merged.missing + found.missing,
            )
        (part / ABOUT).write_text(about.to_text(), encoding="utf-8")
        for converted in part.glob(".converted-*"):
            shutil.rmtree(converted)
    return merged


@contextlib.contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder beside it, which becomes it at the end, and is gone if anything goes wrong."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        yield part
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o777 & ~mask)
        part.replace(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _as_dump(dump: Dump, part: Path) -> Dump:
    """A folder of the known collector is written as a dump first."""
    if not isinstance(dump, KnownDump):
        return dump
    made = Path(tempfile.mkdtemp(dir=part, prefix=".converted-"))
    for rank in dump.ranks:
        with DumpWriter(made, rank=rank, world_size=dump.world_size, header=dump.header) as writer:
            for record in dump.records(rank=rank):
                writer.add(replace(record, tensor=None), dump.tensor(record))
            writer.close([f"{dump.folder}: {text}" for text in dump.damaged])
    return Dump.open(made)


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
    return About(max(dump.world_size for dump in dumps), header, created=first.about.created)


def _same(first: Dump, dump: Dump, name: str) -> bool:
    missing = object()
    return bool(first.header.get(name, missing) == dump.header.get(name, missing))


def _merge_rank(dumps: Sequence[tuple[Dump, Path]], rank: int, part: Path) -> Merged:
    """Of each dump with the folder it was given as, by which its user knows it."""
    chosen: dict[int, tuple[Dump, Record]] = {}
    named = {id(dump): str(folder) for dump, folder in dumps}
    same = 0
    for dump, _ in dumps:
        for record in dump.records(rank=rank):
            other = chosen.setdefault(record.order, (dump, record))
            if other[1] is record:
                continue
            if not _identical(other[1], record):
                raise QgateError(
                    f"{named[id(other[0])]!r} and {named[id(dump)]!r} both have order "
                    f"{record.order} of rank {rank}, {other[1].title} and {record.title}: they are "
                    "no parts of one run."
                )
            same += 1
    home = rank_folder(part, rank)
    home.mkdir()
    shards = _Shards(home)
    missing = [text for dump, _ in dumps for text in _missing(dump, rank)]
    with (home / INDEX).open("w", encoding="ascii") as file:
        file.write(_event("open", run=dumps[0][0].about.run))
        for order in sorted(chosen):
            file.write(line(shards.moved(*chosen[order]).to_dict()))
        file.write(_event("close", missing=missing[:1000], missing_count=len(missing)))
    return Merged(1, len(chosen), same, tuple(missing))


def _identical(a: Record, b: Record) -> bool:
    """The same values in the same place of the run; where they are kept may differ."""
    if _hashes(a) != _hashes(b) or "" in _hashes(a):
        return False
    return replace(a, tensor=None, counts=None) == replace(b, tensor=None, counts=None)


def _hashes(record: Record) -> list[str | None]:
    places = (record.tensor, record.counts)
    return [None if place is None else place.digest for place in places]


def _missing(dump: Dump, rank: int) -> Iterable[str]:
    state = dump.state(rank)
    yield from state.missing
    if state.state == "running or killed":
        yield f"{dump.folder}: what came after {state.records} records, where it was cut off"
    yield from state.damaged


class _Shards:
    """Files of several dumps in the folder of one rank, under new numbers."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._names: dict[Path, str] = {}

    def moved(self, dump: Dump, record: Record) -> Record:
        return replace(
            record,
            tensor=self._place(dump, record, record.tensor),
            counts=self._place(dump, record, record.counts),
        )

    def _place(self, dump: Dump, record: Record, place: Place | None) -> Place | None:
        if place is None:
            return None
        source = dump.shard(replace(record, tensor=place, counts=None))
        assert source is not None
        if source not in self._names:
            self._names[source] = shard_name(len(self._names))
            target = self._home / self._names[source]
            try:
                os.link(source.resolve(), target)
            except OSError:
                shutil.copyfile(source, target)
        return replace(place, file=self._names[source])


def _event(event: str, **told: Any) -> str:
    when = datetime.now(UTC).isoformat(timespec="milliseconds")
    return line({"event": event, "time": when, **told})
