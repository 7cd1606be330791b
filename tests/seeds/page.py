"""docs/seeds.md, made from the promises that a test keeps.

python -m tests.seeds.page          print it
python -m tests.seeds.page --write  write it
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "seeds.md"
PROMISES = Path(__file__).resolve().with_name("promises.md")
_CODE = re.compile(r"``\s?(.+?)\s?``|`([^`]+)`")
_FILE = re.compile(r"[\w.*/=+-]+(/|\.(png|txt|log|csv|jsonl?|html|npy|pt|safetensors|ya?ml|toml))")
MOST_FEATURES = 8
"""How many features of a program a table names."""
_PROGRAM = re.compile(
    r"qgate( (?!-)[a-z]+\b(?![./:]))?( (info|ls|watch|export|capture|compare|modes))?"
)
_HEAD = """# What the replaced tools did

The tables list what the documents of five tools promise, by the command of qgate that gives it, up to eight things each.
`tests/seeds/promises.md` has all of them with their options, and `tests/seeds` runs each and looks for the files and texts that it leaves.
"""


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
        match = re.search(r"exit status (\d)", self.promise)
        return int(match[1]) if match else 0

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


def make_page(promises: str) -> str:
    """Return the page: of each document its introduction, and a row for each program."""
    sections = [_HEAD]
    rows = rows_of(promises)
    for section in promises.split("\n## ")[1:]:
        document, introduction, *_ = section.split("\n\n")
        its = [row for row in rows if row.document == document]
        lines = [
            "| command | gives |", "|---|---|", *_by_program(its),
        ]  # fmt: skip
        reasons = [f"* **{row.feature}**: {row.promise}" for row in its if not row.commands]
        parts = [f"## {document}", introduction, "\n".join(lines), "\n".join(reasons)]
        sections.append("\n\n".join(filter(None, parts)) + "\n")
    return "\n".join(sections)


def _by_program(rows: list[Row]) -> Iterator[str]:
    """Yield a line for each program of qgate, with all that it gives."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.commands:
            groups[_PROGRAM.search(row.commands[-1])[0]].append(row.feature)
    for program, features in groups.items():
        more = "; …" if len(features) > MOST_FEATURES else ""
        yield f"| `{program}` | {'; '.join(features[:MOST_FEATURES])}{more} |"


def main() -> None:
    page = make_page(PROMISES.read_text(encoding="utf-8"))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(page)


if __name__ == "__main__":
    main()
