"""Puts the files of parallel workers together, in an order that does not depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qgate.errors import QgateError
from qgate.files import replacing
from qgate.results.reading import read
from qgate.results.schema import Record, line

# What has to be the same in all files: records of different code or models do not mix.
_SAME = ("qgate", "python", "torch", "device", "seed", "commit", "metrics", "limits")
_JOINED = ("plans", "models")


@dataclass(frozen=True)
class Merged:
    """How many records came together, and what was found torn."""

    records: int
    torn: tuple[str, ...]


def merge(paths: Sequence[Path | str], path: Path | str) -> Merged:
    """One file of many, ordered by test, attempt and place of the site.

    Of a comparison that two files have, after a crashed worker, one that failed is kept.
    """
    if not paths:
        raise QgateError("there are no results to put together: no worker left a file.")
    header: Record = {}
    torn: list[str] = []
    found: dict[tuple[Any, ...], Record] = {}
    for each in map(Path, paths):
        one, records = read(each)
        header = _joined(header, one, each) if header else dict(one)
        for record in records:
            key = _place(record)
            if key not in found or not record["passed"]:
                found[key] = record
        if records.torn:
            torn.append(records.torn)
    with replacing(Path(path)) as fresh, fresh.open("w", encoding="utf-8") as file:
        file.write(line(header))
        file.writelines(line(found[key]) for key in sorted(found))
    return Merged(len(found), tuple(torn))


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
    return joined
