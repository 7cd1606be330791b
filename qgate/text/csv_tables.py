"""Tables for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from qgate.text.escaping import for_csv


def as_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Write one line per row, with a head; missing values are empty cells."""
    return "".join(csv_lines(columns, rows))


def csv_lines(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of `as_csv` one at a time."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([for_csv(name) for name in columns])
    for row in rows:
        yield text.getvalue()
        text.seek(0)
        text.truncate()
        writer.writerow([for_csv(row.get(name)) for name in columns])
    yield text.getvalue()
