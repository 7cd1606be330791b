"""The rows of promises.md: what five tools' documents promise, and the commands that give it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PROMISES = Path(__file__).resolve().with_name("promises.md")
_CODE = re.compile(r"``\s?(.+?)\s?``|`([^`]+)`")
_FILE = re.compile(r"[\w.*/=+-]+(/|\.(png|txt|log|csv|jsonl?|html|npy|pt|safetensors|ya?ml|toml))")


@dataclass(frozen=True)
class Row:
    """A feature of one document, the commands that give it, and what they leave behind."""

    document: str
    feature: str
    commands: tuple[str, ...]
    promise: str

    @property
    def command(self) -> str:
        return "; ".join(self.commands)

    @property
    def status(self) -> int:
        """Return the exit status of the last command."""
        told = re.search(r"exit status (\d)", self.promise)
        return int(told[1]) if told else 0

    def promised(self) -> tuple[list[str], list[str]]:
        """Return the patterns of files, and the texts."""
        spans = codes(self.promise)
        files = [span for span in spans if _FILE.fullmatch(span)]
        return files, [span for span in spans if span not in files]


def codes(cell: str) -> list[str]:
    return [(double or single).replace(r"\|", "|") for double, single in _CODE.findall(cell)]


def rows_of(text: str) -> list[Row]:
    """Return the rows of all tables, under the heading of their document."""
    rows, document = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            document = line[3:]
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if not line.startswith("|") or len(cells) != 3 or set(cells[0]) <= set("-: "):
            continue
        if cells[1] != "command":
            rows.append(Row(document, cells[0], tuple(codes(cells[1])), cells[2]))
    return rows
