"""The tables of a record as CSV and JSON: one row per layer and statistic, and wide ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qgate.activation_stats.record import ActivationsRecord
from qgate.activation_stats.tables import tables_of
from qgate.text import as_csv

Row = Mapping[str, Any]

_LONG = ("layer", "role", "statistic", "value")
# What distinguishes rows of one layer in a wide table, and so begins the name of a statistic.
_BY = {
    "magnitude": ("reduced",),
    "formats": ("format",),
    "smoothing": ("format",),
    "sensitivity": ("format",),
}


def tables(record: ActivationsRecord) -> dict[str, list[Row]]:
    """All tables by the names of their files; `statistics` is the long one."""
    wide: dict[str, list[Row]] = {name: list(rows) for name, rows in tables_of(record).items()}
    return {"statistics": list(_statistics(wide)), **wide}


def _statistics(wide: Mapping[str, Sequence[Row]]) -> Iterator[Row]:
    """A row per layer, role and number; rows of places and channels have tables of their own."""
    for table in ("layers", "magnitude", "outliers", "formats", "smoothing", "sensitivity"):
        for row in wide.get(table, ()):
            by = _BY.get(table, ())
            start = ".".join([table, *(str(row[name]) for name in by if name in row)])
            start = "" if table == "layers" else f"{start}."
            for name, value in row.items():
                told = isinstance(value, int | float) and not isinstance(value, bool)
                if told and name not in ("layer", *by):
                    yield {
                        "layer": row["module"],
                        "role": row.get("role", "output of the model"),
                        "statistic": f"{start}{name}",
                        "value": value,
                    }


def _columns(rows: Sequence[Row]) -> list[str]:
    """Of rows that may have different ones."""
    return list(dict.fromkeys(name for row in rows for name in row))


def csv_files(record: ActivationsRecord) -> dict[str, str]:
    """Names and contents; a table without rows is no file."""
    return {
        f"{name}.csv": as_csv(_LONG if name == "statistics" else _columns(rows), rows)
        for name, rows in tables(record).items()
        if rows
    }


def as_json(record: ActivationsRecord) -> str:
    """The record with its tables; percentiles of channels are in its layers alone."""
    told = {
        name: rows for name, rows in tables(record).items() if name not in ("ranges", "statistics")
    }
    return json.dumps({**record, "tables": told}, allow_nan=False, ensure_ascii=True) + "\n"
