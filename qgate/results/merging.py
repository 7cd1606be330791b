"""Merge the files of parallel workers, in an order that does not depend on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from qgate.errors import QgateError
from qgate.results.coverage import extent_of, merged_extent
from qgate.results.files import read, write_lines
from qgate.results.run_facts import RUN_FACTS, add_other_tests
from qgate.results.schema import BaselineUpdate, Record, RunShard
from qgate.storage.foreign import open_foreign

# Fields that are equal in all files: records of different code or models do not mix.
_SAME = ("qgate", "python", "torch", "device", "seed", "commit", "metrics", "limits")
_JOINED = ("plans", "models")
NOTHING_RAN = 5
Update = BaselineUpdate | None
Shard = RunShard | None


class _Line(NamedTuple):
    """The place of a record's line."""

    source: Path
    start: int
    length: int


@dataclass(frozen=True)
class MergedResults:
    """Number of merged records, texts about torn files, and numbers of missing shards."""

    records: int
    torn: tuple[str, ...]
    missing: tuple[int, ...] = ()


def merge(
    paths: Sequence[Path | str],
    path: Path | str,
    check: Callable[[MergedResults], None] | None = None,
    *,
    allow_partial: bool = False,
) -> MergedResults:
    """Merge files into one, ordered by test, attempt and order of the site.

    Of a comparison that two files have, after a crashed worker, a failed one is kept. `check` may
    raise an error before anything is written. Where CI is set, gates that were not held make the
    merged run fail, unless `allow_partial`.
    """
    if not paths:
        raise QgateError("there are no results to put together: no worker left a file.")
    header: Record = {}
    shards: dict[Path, Shard] = {}
    torn: list[str] = []
    by_key: dict[tuple[Any, ...], _Line] = {}
    for source in map(Path, paths):
        shard_header, records = read(source, shares_texts=False)
        header = _merge_headers(header, shard_header, source) if header else dict(shard_header)
        shards[source] = shard_header.get("shard")
        for record in records:
            key = _sort_key(record)
            if key not in by_key or not record["passed"]:
                by_key[key] = _Line(source, *records.position)
        if records.torn:
            torn.append(records.torn)
    missing = _missing(shards)
    if any(shards.values()):
        complete = all(shard and shard["complete"] for shard in shards.values())
        header |= {"complete": complete and not missing and not torn, "shard": None}
        header["notes"] = [
            *(header.get("notes") or []),
            *(f"shard {source} is missing" for source in missing),
        ]
    if (extent := extent_of(header)) is not None:
        total = max((shard["of"] for shard in shards.values() if shard), default=0)
        header["extent"] = merged_extent(extent, missing, total, allowed=allow_partial)
    merged = MergedResults(len(by_key), tuple(torn), tuple(missing))
    if check is not None:
        check(merged)
    write_lines(path, header, len(by_key), _read_lines(by_key[key] for key in sorted(by_key)))
    return merged


def _read_lines(lines: Iterable[_Line]) -> Iterator[bytes]:
    """Read lines of several files as they stand there: records of all would fill the memory."""
    with contextlib.ExitStack() as stack:
        files: dict[Path, BinaryIO] = {}
        for own in lines:
            if own.source not in files:
                opened = open_foreign(own.source, "results", None)
                files[own.source] = stack.enter_context(opened)
            files[own.source].seek(own.start)
            yield files[own.source].read(own.length).rstrip(b"\r\n") + b"\n"


def _missing(shards: Mapping[Path, Shard]) -> list[int]:
    """Return the numbers of missing shards; refuse files that are no shards of one run."""
    by_number: dict[int, Path] = {}
    total = 0
    for path, shard in shards.items():
        if shard is None:
            continue
        number = shard["number"]
        if total not in (0, shard["of"]):
            raise QgateError(
                f"{path} is shard {number} of {shard['of']}, and others are of {total}."
            )
        if number in by_number:
            raise QgateError(f"{by_number[number]} and {path} are both shard {number} of {total}.")
        by_number[number], total = path, shard["of"]
    unsharded = [path for path, shard in shards.items() if shard is None]
    if total and unsharded:
        raise QgateError(f"{unsharded[0]} is of a whole run, and others are shards of one.")
    return [number for number in range(1, total + 1) if number not in by_number]


def _sort_key(record: Record) -> tuple[Any, ...]:
    names = (str(record[name]) for name in ("site", "scope", "model", "mode", "layer", "suite"))
    return record["node"], record.get("attempt", 0), record.get("order", 0), *names


def _merge_headers(header: Record, other: Record, path: Path) -> Record:
    for name in _SAME:
        if header.get(name) != other.get(name):
            raise QgateError(
                f"{path} is of another run: its {name} is {other.get(name)!r}, not "
                f"{header.get(name)!r}."
            )
    joined = {**header, "started": min(header["started"], other["started"])}
    joined["modes"] = list(dict.fromkeys([*header["modes"], *other["modes"]]))
    for name in _JOINED:
        for key in header[name].keys() & other[name].keys():
            if header[name][key] != other[name][key]:
                raise QgateError(f"{path} is of another run: its {name} differ for {key!r}.")
        joined[name] = {**header[name], **other[name]}
    # Headers of earlier versions have fewer fields.
    for name, merge_field in _MERGE_FIELD.items():
        values = [source[name] for source in (header, other) if name in source]
        if values:
            joined[name] = merge_field(*values) if len(values) > 1 else values[0]
    return joined


def _status(one: int | None, other: int | None) -> int | None:
    """Return the worst exit status: None if a run did not end, NOTHING_RAN if no test ran."""
    if one is None or other is None:
        return None
    return max([status for status in (one, other) if status != NOTHING_RAN], default=NOTHING_RAN)


def _lists(one: Sequence[str], other: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*one, *other]))


def _folders(one: str, other: str) -> str:
    return one if one == other else f"{one}, {other}"


def _updates(one: Update, other: Update) -> Update:
    if one is None or other is None:
        return one or other
    return {
        **one,
        "dry_run": one["dry_run"] or other["dry_run"],
        "done": one["done"] and other["done"],
        "entries": one["entries"] + other["entries"],
        "changes": _lists(one["changes"], other["changes"]),
        "stale": _lists(one["stale"], other["stale"]),
    }


_MERGE_FIELD: dict[str, Callable[[Any, Any], Any]] = {
    **{fact.key: fact.merge for fact in RUN_FACTS if fact.merge is not None},
    "complete": lambda one, other: one and other,
    "exit": _status,
    "broken": lambda one, other: {**one, **other},
    "errors": _lists,
    "notes": _lists,
    "other": add_other_tests,
    "baselines": _folders,
    "update": _updates,
}
