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
from functools import partial
from typing import Any

import xxhash

from qgate.dumps.layout import INDEX, index_parts_in
from qgate.dumps.record import Record
from qgate.errors import QgateError
from qgate.records.plain_data import plain
from qgate.storage.folders import Folder, Stamp
from qgate.storage.foreign import foreign_line

EVENT = "event"
_DIGEST = "digest"
_MOST_REFUSED = 1000


def line(content: Mapping[str, Any]) -> str:
    return json.dumps(plain(content), separators=(",", ":"), allow_nan=False) + "\n"


class SessionDigest:
    """Digest of all lines of one session of a writer; its closing line has it, and is part of it.

    It finds damage: what records say is proved by nothing else.
    """

    def __init__(self) -> None:
        self._lines = xxhash.xxh3_64()

    def add(self, lines: bytes) -> None:
        self._lines.update(lines)

    def closing(self, content: Mapping[str, object]) -> dict[str, object]:
        """Return the content of the closing line, with the digest."""
        self.add(line(content).encode("ascii"))
        return {**content, _DIGEST: self._lines.hexdigest()}


@dataclass
class IndexLines:
    """Records and events of a part of an index.

    damaged   lines that are no record, with the reasons
    torn      bytes of a last line that is not whole
    session   digest of the session that is open, if its opening was read
    ends      end of the last whole line, by file
    """

    records: list[Record] = field(default_factory=list)
    events: list[dict[str, object]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    torn: int = 0
    session: SessionDigest | None = None
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
            lines.ends[name], refused = start, 0
            where = str(self._home.at(name))
            for raw in iter(partial(foreign_line, file, where, "dumps"), b""):
                if not raw.endswith(b"\n"):
                    lines.torn += len(raw)
                    break
                try:
                    self._take(json.loads(raw), raw, lines)
                except (QgateError, ValueError, TypeError, RecursionError) as error:
                    refused += 1
                    if refused <= _MOST_REFUSED:
                        lines.damaged.append(f"{where} at byte {lines.ends[name]}: {error}")
                lines.ends[name] += len(raw)
            if refused > _MOST_REFUSED:
                more = refused - _MOST_REFUSED
                lines.damaged.append(f"{where}: {more} more lines are no records")

    def _take(self, content: Any, raw: bytes, lines: IndexLines) -> None:
        if not isinstance(content, dict):
            raise ValueError("it is no object")
        if content.get(EVENT) == "open":
            lines.session = SessionDigest()
        if content.get(EVENT) == "close":
            lines.events.append(content)
            self._check_session(content, lines)
            return
        if lines.session is not None:
            lines.session.add(raw)
        if EVENT in content:
            lines.events.append(content)
            return
        record = Record.from_dict(content)
        if record.rank != self._rank:
            raise ValueError(f"it is of rank {record.rank}")
        lines.records.append(record)

    @staticmethod
    def _check_session(content: Mapping[str, object], lines: IndexLines) -> None:
        """Raise a ValueError where the lines of a session are not those that were written."""
        session, lines.session = lines.session, None
        digested = {name: value for name, value in content.items() if name != _DIGEST}
        if session is not None and session.closing(digested) != content:
            raise ValueError(
                "the lines up to here are not those that were written: their digest is another one"
            )
