"""Names from models and files, where they are shown: in a line, in a cell of a table."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def one_line(text: object) -> str:
    """A name as one line of printable characters, whatever is in it."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in str(text)
    )


def cell(value: object) -> str | int | float:
    """A value as a table may hold it: numbers as they are, nothing for what is missing, and an
    apostrophe before a text that a spreadsheet would take for a formula."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return value if math.isfinite(value) else ""
    text = str(value)
    return f"'{one_line(text)}" if text.startswith(_FORMULA) else one_line(text)


def as_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """One line per row, with a head; what a row lacks is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([cell(row.get(name)) for name in columns])
    return text.getvalue()
