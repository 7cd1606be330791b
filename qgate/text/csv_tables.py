"""Tables as they are written for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from qgate.text.escaping import for_csv


def as_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """One line per row, with a head; what a row lacks is an empty cell."""
    return "".join(csv_lines(columns, rows))


def csv_lines(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The same, a line at a time."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([for_csv(name) for name in columns])
    for row in rows:
        yield text.getvalue()
        text.seek(0)
        text.truncate()
        writer.writerow([for_csv(row.get(name)) for name in columns])
    yield text.getvalue()
