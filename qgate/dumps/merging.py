"""Merge ranks of several folders into one dump; shards are linked where possible, else copied.

Workers merge a rank each; memory for all ranks does not grow with their records. The dump appears
when it is whole.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from qgate.charts.overviews import Overview, Overviewed
from qgate.dumps.index import SessionDigest, line
from qgate.dumps.layout import (
    INDEX,
    MANIFEST,
    RUN,
    DumpManifest,
    rank_name,
    ranks_in,
    remove_ranks,
    shard_name,
)
from qgate.dumps.reading import Dump
from qgate.dumps.record import Record, StoredValues
from qgate.dumps.tensor_saver_files import TensorSaverDump
from qgate.dumps.writing import DumpWriter
from qgate.engine import Workers, merged
from qgate.errors import QgateError
from qgate.storage import locations
from qgate.storage.access import folder_of
from qgate.storage.folders import Folder
from qgate.storage.new_folders import new_folder, new_subfolder, temporary_beside
from qgate.text import counted

_MOST_MISSING = 1000
_MARK = ".qgate-merge"


@dataclass(frozen=True, repr=False)
class MergedDump(Overviewed):
    """Counts of a merged dump; `same` records were in several folders and are stored once.

    `missing` lists the first thousand of `missing_count`.
    """

    ranks: int = 0
    records: int = 0
    same: int = 0
    missing: tuple[str, ...] = ()
    missing_count: int = 0

    def overview(self) -> Overview:
        """Count the records, and name those that are missing."""
        title = f"Merged dump of {counted(self.ranks, 'rank')}: {counted(self.records, 'record')}"
        title += f", {self.same:,} of them in several folders, {self.missing_count:,} missing"
        return Overview(title, self.missing, lambda name: {"missing": name}, "record")

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
    """A rank to merge: the folders that may have it, which of them are foreign, and the output."""

    rank: int
    folders: tuple[locations.Location, ...]
    foreign: tuple[bool, ...]
    output: locations.Location


def merge_dumps(
    folders: Sequence[locations.Location | str],
    output: locations.Location | str,
    workers: Workers | int = 1,
    step: Callable[[int, int], None] = lambda _done, _total: None,
) -> MergedDump:
    """Merge dumps into one; two records of one rank and order clash.

    `step` gets the number of ranks done, and of all. A rank whose worker ends is an error.
    """
    if not folders:
        raise QgateError("there are no dumps to put together.")

    def remove(folder: Folder) -> None:
        remove_ranks(folder)
        folder.remove(MANIFEST)

    with new_folder(output, _MARK, remove) as part:
        manifest, parts = _planned([Dump.open(folder) for folder in folders], part)
        outcome = merged(
            merge_rank, operator.add, parts, workers, step=lambda done: step(done, len(parts))
        )
        if outcome.failed:
            index, failure = next(iter(outcome.failed.items()))
            more = f", nor were {len(outcome.failed) - 1} others" if len(outcome.failed) > 1 else ""
            raise QgateError(
                f"rank {parts[index].rank} was not put together: {failure.reason}{more}. Nothing "
                f"was written to {str(output)!r}."
            )
        total = outcome.result or MergedDump()
        present = len(ranks_in(part.fresh()))
        if present != total.ranks:
            raise QgateError(
                f"{total.ranks} ranks were put together, and {present} of them are in "
                f"{str(part.location)!r}: those who work on them have to see the same folders."
            )
        part.put(MANIFEST, manifest.to_text().encode())
    return total


def _planned(dumps: Sequence[Dump], output: Folder) -> tuple[DumpManifest, list[RankPart]]:
    ranks = [set(dump.folders) for dump in dumps]
    parts = []
    for rank in sorted(set().union(*ranks)):
        having = [dump for dump, own in zip(dumps, ranks, strict=True) if rank in own]
        folders, foreign = zip(*((dump.folder, dump.is_foreign) for dump in having), strict=True)
        parts.append(RankPart(rank, folders, foreign, output.location))
    return _shared_manifest(dumps), parts


def _shared_manifest(dumps: Sequence[Dump]) -> DumpManifest:
    """Return a manifest with the settings that all dumps share, and the others by folder."""
    first = dumps[0]
    for dump in dumps[1:]:
        sizes = (first.world_size, dump.world_size)
        if dump.manifest.run != first.manifest.run:
            raise QgateError(
                f"{str(dump.folder)!r} is of run {dump.manifest.run!r} and {str(first.folder)!r} "
                f"of {first.manifest.run!r}: only ranks of one run are put together."
            )
        if sizes[0] != sizes[1] and first.header.get("collector") != "known":
            raise QgateError(
                f"{str(dump.folder)!r} is of {sizes[1]} ranks and {str(first.folder)!r} of "
                f"{sizes[0]}: only ranks of one run are put together."
            )
    missing = object()
    names = {name: None for dump in dumps for name in dump.header}
    shared = {
        name: first.header[name]
        for name in names
        if all(first.header.get(name, missing) == dump.header.get(name, missing) for dump in dumps)
    }
    header = {name: value for name, value in shared.items() if name != RUN}
    if first.manifest.run:
        header[RUN] = first.manifest.run
    if len(shared) < len(names):
        header["merged_from"] = [
            {name: value for name, value in dump.header.items() if name not in shared}
            for dump in dumps
        ]
    created = first.manifest.created
    if isinstance(first, TensorSaverDump):
        created = datetime.fromtimestamp(first.began, UTC).isoformat(timespec="seconds")
    return DumpManifest(max(dump.world_size for dump in dumps), header, created=created)


# One rank ---------------------------------------------------------------------------------------


def merge_rank(part: RankPart) -> MergedDump:
    """Merge a rank; doing it again gives the same files and removes none."""
    output = folder_of(part.output)
    with (
        new_subfolder(output, rank_name(part.rank)) as home,
        contextlib.ExitStack() as stack,
    ):
        sources = []
        for folder, is_foreign in zip(part.folders, part.foreign, strict=True):
            dump = _opened_once(folder, str(part.output)) if is_foreign else Dump.open(folder)
            if dump.has(part.rank):
                events = dump.events(part.rank)
                if is_foreign:
                    temporary = stack.enter_context(temporary_beside(home, ".converted-"))
                    dump = _converted(dump, part.rank, temporary)
                sources.append((dump, str(folder), events))
        return _merge_rank(sources, part.rank, home) if sources else MergedDump()


@functools.lru_cache(maxsize=4)
def _opened_once(folder: locations.Location, output: str) -> Dump:  # noqa: ARG001
    """Open a folder once in each process that works on one output: all its files are read."""
    return Dump.open(folder)


def _converted(dump: Dump, rank: int, folder: Path) -> Dump:
    """Convert a rank of a foreign folder into a dump."""
    with DumpWriter(folder, rank=rank, world_size=dump.world_size, header=dump.header) as writer:
        for record in dump.records_of(rank):
            writer.add(replace(record, tensor=None), dump.tensor(record))
        writer.close([f"{dump.folder}: {text}" for text in dump.damaged])
    return Dump.open(folder)


def _merge_rank(
    sources: Sequence[tuple[Dump, str, list[dict[str, object]]]], rank: int, home: Folder
) -> MergedDump:
    """Merge the records of dumps, each with the folder that the user named and its events."""
    chosen: dict[int, tuple[int, Record]] = {}
    same = 0
    for number, (dump, folder, _) in enumerate(sources):
        for record in dump.records_of(rank):
            other = chosen.setdefault(record.order, (number, record))
            if other[1] is record:
                continue
            if not _identical(other[1], record):
                raise QgateError(
                    f"{sources[other[0]][1]!r} and {folder!r} both have order {record.order} of "
                    f"rank {rank}, {other[1].title} and {record.title}: they are no parts of one "
                    "run."
                )
            same += 1
    dumps = [dump for dump, _, _ in sources]
    states = [dump.state(rank) for dump in dumps]
    missing: list[str] = []
    for dump, state in zip(dumps, states, strict=True):
        missing += state.missing
        if state.state == "running or killed":
            missing.append(
                f"{dump.folder}: what came after {state.records} records, where it was cut off"
            )
        missing += state.damaged
    count = len(missing) + sum(state.missing_count - len(state.missing) for state in states)
    missing = missing[:_MOST_MISSING]
    times = sorted(
        str(event["time"]) for _, _, events in sources for event in events if "time" in event
    )
    began, ended = ({"time": times[i]} if times else {} for i in (0, -1))
    shards = _ShardCopies(home, dumps, rank)
    with home.writing(INDEX) as path, path.open("w", encoding="ascii", newline="\n") as file:
        session = SessionDigest()

        def write(text: str) -> None:
            session.add(text.encode("ascii"))
            file.write(text)

        write(line({"event": "open", **began, "run": dumps[0].manifest.run}))
        for order in sorted(chosen):
            number, record = chosen[order]
            tensor = shards.copy(number, record, record.tensor)
            counts = shards.copy(number, record, record.counts)
            write(line(replace(record, tensor=tensor, counts=counts).to_dict()))
        closing = {"event": "close", **ended, "missing": missing, "missing_count": count}
        file.write(line(session.closing(closing)))
    return MergedDump(1, len(chosen), same, tuple(missing), count)


def _identical(a: Record, b: Record) -> bool:
    """Tell whether two records agree in everything but the files of their values."""
    hashes, hashes_of_b = ([p and p.digest for p in (r.tensor, r.counts)] for r in (a, b))
    if hashes != hashes_of_b or "" in hashes:
        return False
    return replace(a, tensor=None, counts=None) == replace(b, tensor=None, counts=None)


class _ShardCopies:
    """Shards of several dumps, copied into the folder of one rank under new numbers."""

    def __init__(self, home: Folder, dumps: Sequence[Dump], rank: int) -> None:
        self._home, self._dumps = home, dumps
        self._sources = [dump.files.inside(rank_name(rank)) for dump in dumps]
        self._names: dict[tuple[int, str], str] = {}

    def copy(self, number: int, record: Record, values: StoredValues | None) -> StoredValues | None:
        """Copy the shard of some values once, and return where they are now."""
        if values is None:
            return None
        source = number, values.file
        if source not in self._names:
            self._dumps[number].shard(replace(record, tensor=values, counts=None))  # refuses
            self._names[source] = shard_name(len(self._names))
            self._home.copy(self._sources[number], values.file, self._names[source])
        return replace(values, file=self._names[source])
