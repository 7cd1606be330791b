"""The index of a rank: lines of JSON, a record or an event each, that only grow.

A last line without its end is torn: its writer is at work on it, or was stopped there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qgate.dumps.layout import INDEX
from qgate.dumps.records import Record, plain
from qgate.errors import QgateError

EVENT = "event"


def line(told: Mapping[str, Any]) -> str:
    return json.dumps(plain(told), separators=(",", ":"), allow_nan=False) + "\n"


@dataclass
class Lines:
    """What a stretch of an index says; `end` is where its last whole line ends.

    damaged   lines that are no record, with what is wrong
    torn      bytes of a last line that is not whole
    """

    records: list[Record] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    torn: int = 0
    end: int = 0

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

    def __init__(self, home: Path) -> None:
        self.path = home / INDEX
        self._rank = int(home.name.removeprefix("rank"))

    def read(self, start: int = 0) -> Lines:
        """From a place on, as far as it is whole; nothing where there is no index yet."""
        found = Lines(end=start)
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return found
        with file:
            file.seek(start)
            for raw in file:
                if not raw.endswith(b"\n"):
                    found.torn = len(raw)
                    break
                self._take(raw, found)
                found.end += len(raw)
        return found

    def _take(self, raw: bytes, found: Lines) -> None:
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
            found.damaged.append(f"{self.path} at byte {found.end}: {error}")
