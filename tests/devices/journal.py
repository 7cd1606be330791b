"""What a process of a part has done so far: one line of JSON for each step, in one file.

    {"cases": 12}       how many there are
    {"begins": "mx"}    a case begins
    {"row": {…}}        what it found
    {"ends": "mx"}      it ended
    {"end": true}       so did the process

Lines are written whole, so a killed process leaves all but the one it was in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from tests.devices.record import Row


class Journal:
    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, **step: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(step) + "\n")

    def add_row(self, row: Row) -> None:
        self.add(row=msgspec.to_builtins(row, enc_hook=str))

    def close_line(self) -> None:
        """End the line that a killed process left."""
        content = self.path.read_bytes() if self.path.exists() else b""
        if content and not content.endswith(b"\n"):
            with self.path.open("ab") as file:
                file.write(b"\n")

    def read(self, progress: Progress | None = None) -> Progress:
        """Return the progress after all whole lines, of which it takes those that are new."""
        progress = progress or Progress()
        if not self.path.exists():
            return progress
        with self.path.open("rb") as file:
            file.seek(progress.offset)
            whole, end, _ = file.read().rpartition(b"\n")
        progress.offset += len(whole + end)
        for line in whole.split(b"\n") if end else ():
            progress.take(_step(line))
        return progress


def _step(line: bytes) -> dict[str, Any]:
    try:
        step = json.loads(line)
    except ValueError:
        step = None
    return step if isinstance(step, dict) else {"unreadable": line[:200].decode(errors="replace")}


class Progress(msgspec.Struct):
    """A journal as it was read: `under_way` is the case that began last and has not ended."""

    rows: list[Row] = msgspec.field(default_factory=list)
    begun: list[str] = msgspec.field(default_factory=list)
    cases: int | None = None
    under_way: str | None = None
    ended: bool = False
    unreadable: str = ""
    offset: int = 0

    def take(self, step: dict[str, Any]) -> None:
        try:
            if "row" in step:
                self.rows.append(msgspec.convert(step["row"], Row))
            elif "begins" in step:
                self.begun.append(step["begins"])
                self.under_way = step["begins"]
            elif "ends" in step:
                self.under_way = None
            elif "cases" in step:
                self.cases = step["cases"]
            elif "end" in step:
                self.ended = True
            else:
                raise ValueError("no step")
        except ValueError:
            self.unreadable = self.unreadable or str(step.get("unreadable", step))
