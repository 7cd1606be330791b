"""The report of a device: rows of parts as JSON, and one page of Markdown, worst first."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec
from tabulate import tabulate

Status = Literal["wrong", "died", "hung", "unreadable", "not run", "noted", "right"]
RED: tuple[Status, ...] = ("wrong", "died", "hung", "unreadable", "not run")
_ORDER: tuple[Status, ...] = (*RED, "noted", "right")
_MOST_RED, _MOST_TEXT = 40, 300
JSON_NAME, PAGE_NAME = "devices.json", "devices.md"


class Row(msgspec.Struct, omit_defaults=True):
    """One case of a part.

    right, wrong   it was checked; `text` says what is wrong
    died, hung     its process ended, or was killed when its time was over
    unreadable     its process wrote something else than rows
    not run        no time was left
    noted          a fact or a figure that nothing judges
    """

    name: str
    status: Status
    text: str = ""
    seconds: float = 0
    figures: dict[str, Any] = msgspec.field(default_factory=dict)


class PartReport(msgspec.Struct, omit_defaults=True):
    """The rows of one part.

    share_s   the time that it had
    log       what its processes printed
    judged    False for a part whose rows decide nothing, such as kernels of others
    """

    name: str
    status: Literal["done", "incomplete", "not run", "under way"]
    seconds: float = 0
    share_s: float = 0
    log: str = ""
    judged: bool = True
    rows: list[Row] = msgspec.field(default_factory=list)

    @property
    def red(self) -> bool:
        has_red_row = self.judged and any(row.status in RED for row in self.rows)
        return self.status != "done" or has_red_row


class DeviceReport(msgspec.Struct):
    """All that a run of `python -m tests.devices` measured; `complete` once all parts had a turn."""

    schema: Literal[1]
    kind: Literal["qgate device report"]
    device: str
    started: str
    minutes: float
    seconds: float
    complete: bool
    parts: list[PartReport]

    @property
    def red(self) -> bool:
        return not self.complete or any(part.red for part in self.parts)


def write_report(report: DeviceReport, folder: Path) -> None:
    """Write both files; each is replaced as a whole, so a killed run leaves the one before."""
    _replace(folder / JSON_NAME, msgspec.json.format(msgspec.json.encode(report)))
    _replace(folder / PAGE_NAME, page(report).encode())


def read_report(folder: Path) -> DeviceReport:
    return msgspec.json.decode((folder / JSON_NAME).read_bytes(), type=DeviceReport)


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def counted(rows: list[Row]) -> str:
    """Return the numbers of rows by status, such as `1 wrong, 88 right`."""
    numbers = Counter(row.status for row in rows)
    return ", ".join(f"{numbers[status]} {status}" for status in _ORDER if numbers[status])


def red_lines(report: DeviceReport) -> list[str]:
    """Return the first red rows as lines of a terminal."""
    lines = [
        f"{part.name}: {row.name}: {row.status}: {_cell(row.text)}"
        for part in report.parts
        for row in part.rows
        if part.judged and row.status in RED
    ]
    return lines[:_MOST_RED]


def page(report: DeviceReport) -> str:
    """Return the report as Markdown: one line for each part, then what each has to say."""
    verdict = "something is red" if report.red else "all parts are green"
    if not report.complete:
        verdict = "the run has not ended"
    table = [
        (part.name, part.status, counted(part.rows), f"{part.seconds:.0f}")
        for part in sorted(report.parts, key=lambda part: not part.red)
    ]
    lines = [
        f"# qgate on {report.device}: {verdict}",
        f"Begun {report.started}; {report.seconds:.0f} s of at most {report.minutes * 60:.0f}.",
        _table(table, ("part", "status", "cases", "s")),
    ]
    for part in sorted(report.parts, key=lambda part: not part.red):
        lines += _section(part)
    return "\n\n".join(lines) + "\n"


def _section(part: PartReport) -> list[str]:
    sorted_rows = sorted(
        (row for row in part.rows if row.status != "right"),
        key=lambda row: _ORDER.index(row.status),
    )
    red = [row for row in sorted_rows if row.status in RED]
    left_out = len(red) - _MOST_RED
    if left_out > 0:
        sorted_rows = red[:_MOST_RED] + sorted_rows[len(red) :]
    lines = [f"## {part.name}"] if sorted_rows else []
    if sorted_rows:
        rows = [(row.name, row.status, row.text, _seconds(row)) for row in sorted_rows]
        lines.append(_table(rows, ("case", "", "text", "s")))
    if left_out > 0:
        lines.append(f"… and {left_out} more in {JSON_NAME}")
    for row in sorted_rows:
        if text := row.figures.get("printed"):
            lines.append(f"```text\n{text.rstrip()}\n```")
    if sorted_rows and part.red and part.log:
        lines.append(f"What its processes printed: {part.log}")
    return lines


def _seconds(row: Row) -> str:
    return f"{row.seconds:.1f}" if row.seconds else ""


def _table(rows: list[tuple[str, ...]], heads: tuple[str, ...]) -> str:
    cells = [[_cell(text) for text in row] for row in rows]
    return tabulate(cells, headers=heads, tablefmt="github", disable_numparse=True)


def _cell(text: str) -> str:
    line = " ".join(text.split())
    line = line if len(line) <= _MOST_TEXT else line[: _MOST_TEXT - 1] + "…"
    return line.replace("|", r"\|").replace("<", "&lt;")
