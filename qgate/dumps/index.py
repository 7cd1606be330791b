"""The index of a rank: lines of JSON, each a record or an event, which are only appended.

It is one file, or parts that never change where nothing can be appended, as in a store; with both,
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
from qgate.dumps.record import Record
from qgate.errors import QgateError
from qgate.records.plain_data import plain
from qgate.storage.folders import Folder, Stamp

EVENT = "event"


def line(content: Mapping[str, Any]) -> str:
    return json.dumps(plain(content), separators=(",", ":"), allow_nan=False) + "\n"


@dataclass
class IndexLines:
    """Records and events of a part of an index.

    damaged   lines that are no record, with the reasons
    torn      bytes of a last line that is not whole
    ends      end of the last whole line, by file
    """

    records: list[Record] = field(default_factory=list)
    events: list[dict[str, object]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    torn: int = 0
    ends: dict[str, int] = field(default_factory=dict)

    def is_of(self, run: str) -> bool:
        """Tell whether this run wrote or continued it; an earlier run may have left it."""
        openings = [event for event in self.events if event[EVENT] == "open"]
        return (
            not run
            or not openings
            or any(
                event.get("run") in (run, "", None) or event.get("existing") == "append"
                for event in openings
            )
        )


class Index:
    """The index in the folder of a rank."""

    def __init__(self, home: Folder) -> None:
        self._home = home
        self._rank = int(home.name.removeprefix("rank"))

    def stamp(self) -> tuple[Stamp | None, Stamp | None]:
        """Return a stamp that changes when there is more to read."""
        return self._home.stamp(INDEX), self._home.stamp()

    def read(self, since: Mapping[str, int] | None = None) -> IndexLines:
        """Read the whole lines, from the ends of an earlier read on."""
        since = since or {}
        lines = IndexLines(ends=dict(since))
        try:
            parts = [name for name in index_parts_in(self._home).values() if name not in since]
        except FileNotFoundError:
            return lines
        for name in (INDEX, *parts):
            with contextlib.suppress(FileNotFoundError):
                self._read(name, since.get(name, 0), lines)
        return lines

    def _read(self, name: str, start: int, lines: IndexLines) -> None:
        with self._home.open(name, start) as file:
            lines.ends[name] = start
            for raw in file:
                if not raw.endswith(b"\n"):
                    lines.torn += len(raw)
                    break
                try:
                    self._take(json.loads(raw), lines)
                except (QgateError, ValueError, TypeError, RecursionError) as error:
                    where = f"{self._home.at(name)} at byte {lines.ends[name]}"
                    lines.damaged.append(f"{where}: {error}")
                lines.ends[name] += len(raw)

    def _take(self, content: Any, lines: IndexLines) -> None:
        if not isinstance(content, dict):
            raise ValueError("it is no object")
        if EVENT in content:
            lines.events.append(content)
            return
        record = Record.from_dict(content)
        if record.rank != self._rank:
            raise ValueError(f"it is of rank {record.rank}")
        lines.records.append(record)
