"""Puts the files of parallel workers together, in an order that does not depend on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qgate.errors import QgateError
from qgate.results.others import joined_others
from qgate.results.reading import read
from qgate.results.schema import Record, line
from qgate.storage.files import replacing

# What has to be the same in all files: records of different code or models do not mix.
_SAME = ("qgate", "python", "torch", "device", "seed", "commit", "metrics", "limits")
_JOINED = ("plans", "models")
NOTHING_RAN = 5
Update = dict[str, Any] | None
Shard = dict[str, Any] | None


@dataclass(frozen=True)
class MergedResults:
    """How many records came together, what was found torn, and which shards are not there."""

    records: int
    torn: tuple[str, ...]
    missing: tuple[int, ...] = ()


def merge(
    paths: Sequence[Path | str],
    path: Path | str,
    check: Callable[[MergedResults], None] | None = None,
) -> MergedResults:
    """One file of many, ordered by test, attempt and place of the site.

    Of a comparison that two files have, after a crashed worker, one that failed is kept. What
    `check` raises comes before anything is written.
    """
    if not paths:
        raise QgateError("there are no results to put together: no worker left a file.")
    header: Record = {}
    shards: dict[Path, Shard] = {}
    torn: list[str] = []
    found: dict[tuple[Any, ...], Record] = {}
    for each in map(Path, paths):
        one, records = read(each)
        header = _joined(header, one, each) if header else dict(one)
        shards[each] = one.get("shard")
        for record in records:
            key = _place(record)
            if key not in found or not record["passed"]:
                found[key] = record
        if records.torn:
            torn.append(records.torn)
    missing = _missing(shards)
    if any(shards.values()):
        whole = all(shard and shard["complete"] for shard in shards.values())
        header |= {"complete": whole and not missing and not torn, "shard": None}
        header["notes"] = [
            *(header.get("notes") or []),
            *(f"shard {each} is missing" for each in missing),
        ]
    merged = MergedResults(len(found), tuple(torn), tuple(missing))
    if check is not None:
        check(merged)
    with replacing(Path(path)) as fresh, fresh.open("w", encoding="utf-8") as file:
        file.write(line({**header, "records": len(found)}))
        file.writelines(line(found[key]) for key in sorted(found))
    return merged


def _missing(shards: Mapping[Path, Shard]) -> list[int]:
    """Which parts of a divided run are not there; files that are no parts of one are refused."""
    seen: dict[int, Path] = {}
    of = 0
    for path, shard in shards.items():
        if shard is None:
            continue
        number = shard["number"]
        if of not in (0, shard["of"]):
            raise QgateError(f"{path} is shard {number} of {shard['of']}, and others are of {of}.")
        if number in seen:
            raise QgateError(f"{seen[number]} and {path} are both shard {number} of {of}.")
        seen[number], of = path, shard["of"]
    alone = [path for path, shard in shards.items() if shard is None]
    if of and alone:
        raise QgateError(f"{alone[0]} is of a whole run, and others are shards of one.")
    return [number for number in range(1, of + 1) if number not in seen]


def _place(record: Record) -> tuple[Any, ...]:
    names = (str(record[name]) for name in ("site", "scope", "model", "mode", "layer", "suite"))
    return record["node"], record.get("attempt", 0), record.get("order", 0), *names


def _joined(header: Record, other: Record, path: Path) -> Record:
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
    # Headers of earlier versions say less.
    for name, together in _TOLD.items():
        said = [each[name] for each in (header, other) if name in each]
        if said:
            joined[name] = together(*said) if len(said) > 1 else said[0]
    return joined


def _status(one: int | None, other: int | None) -> int | None:
    """The worst; none where a run did not end, and only nothing at all is that nothing ran."""
    if one is None or other is None:
        return None
    return max([each for each in (one, other) if each != NOTHING_RAN], default=NOTHING_RAN)


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


_TOLD: dict[str, Callable[[Any, Any], Any]] = {
    "complete": lambda one, other: one and other,
    "exit": _status,
    "broken": lambda one, other: {**one, **other},
    "errors": _lists,
    "notes": _lists,
    "other": joined_others,
    "baselines": _folders,
    "update": _updates,
}
