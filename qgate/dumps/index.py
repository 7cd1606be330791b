"""The index of a rank: lines of JSON, a record or an event each, that only grow.

It is one file that is appended to, or parts of which none changes, where that cannot be; with both,
the file comes first. A last line without its end is torn: its writer is at work on it, or was
stopped there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qgate.dumps.layout import INDEX, index_parts_in
from qgate.dumps.records import Record, plain
from qgate.errors import QgateError
from qgate.storage.folders import Folder, Stamp

EVENT = "event"


def line(told: Mapping[str, Any]) -> str:
    return json.dumps(plain(told), separators=(",", ":"), allow_nan=False) + "\n"


@dataclass
class Lines:
    """What a stretch of an index says.

    damaged   lines that are no record, with what is wrong
    torn      bytes of a last line that is not whole
    ends      of each file that was read, where its last whole line ends
    """

    records: list[Record] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    torn: int = 0
    ends: dict[str, int] = field(default_factory=dict)

    def is_of(self, run: str) -> bool:
        """Whether a run wrote it, or was gone on with; False for what an earlier one left there."""
        begun = [event for event in self.events if event[EVENT] == "open"]
        return (
            not run
            or not begun
            or any(
                event.get("run") in (run, "", None) or event.get("existing") == "append"
                for event in begun
            )
        )


class Index:
    """The index in the folder of a rank."""

    def __init__(self, home: Folder) -> None:
        self._home = home
        self._rank = int(home.name.removeprefix("rank"))

    def stamp(self) -> tuple[Stamp | None, Stamp | None]:
        """Another one, when there is more to read."""
        return self._home.stamp(INDEX), self._home.stamp()

    def read(self, since: Mapping[str, int] | None = None) -> Lines:
        """As far as it is whole, from the ends on that were read to before."""
        since = since or {}
        found = Lines(ends=dict(since))
        try:
            parts = [name for name in index_parts_in(self._home).values() if name not in since]
        except FileNotFoundError:
            return found
        for name in (INDEX, *parts):
            with contextlib.suppress(FileNotFoundError):
                self._read(name, since.get(name, 0), found)
        return found

    def _read(self, name: str, start: int, found: Lines) -> None:
        with self._home.open(name, start) as file:
            found.ends[name] = start
            for raw in file:
                if not raw.endswith(b"\n"):
                    found.torn += len(raw)
                    break
                self._take(raw, name, found)
                found.ends[name] += len(raw)

    def _take(self, raw: bytes, name: str, found: Lines) -> None:
        try:
            told = json.loads(raw)
            if not isinstance(told, dict):
                raise ValueError("it is no object")
            if EVENT in told:
                found.events.append(told)
                return
            record = Record.from_dict(told)
            if record.rank != self._rank:
                raise ValueError(f"it is of rank {record.rank}")
            found.records.append(record)
        except (QgateError, ValueError, TypeError, RecursionError) as error:
            where = f"{self._home.at(name)} at byte {found.ends[name]}"
            found.damaged.append(f"{where}: {error}")
