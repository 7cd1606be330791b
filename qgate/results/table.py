"""Records as a flat table, one row per site and metric."""

from __future__ import annotations

import contextlib
import csv
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qgate.results.ranking import binding_checks
from qgate.storage.files import replacing
from qgate.text import for_csv

COLUMNS = (
    "suite", "node", "model", "mode", "layer", "site", "scope", "metric", "value", "ideal",
    "accepted", "side", "bound", "times", "kind", "improved", "metric_passed", "passed", "seconds",
)  # fmt: skip
_PLACE, _NODE = COLUMNS[: COLUMNS.index("metric")], COLUMNS.index("node")
_LIMIT = ("side", "bound", "times", "kind", "improved")
_BOUND, _NO_LIMIT = _LIMIT.index("bound"), ("",) * (len(_LIMIT) + 1)


def to_csv(records: Iterable[Mapping[str, Any]], path: Path | str) -> int:
    """Write the table and return its number of rows."""
    with csv_table(path) as add:
        return sum(map(add, records))


@contextlib.contextmanager
def csv_table(path: Path | str) -> Iterator[Callable[[Mapping[str, Any]], int]]:
    """Write a table whose rows a function adds, record by record; it returns how many.

    A metric with several limits shows the binding one; a number that is not finite is shown by its
    name, a missing one is empty. Names that a spreadsheet would take for a formula get an
    apostrophe. The node and the seconds of a test are in its first row only.
    """
    last_test = None

    def add(record: Mapping[str, Any]) -> int:
        nonlocal last_test
        test = record["node"], record.get("attempt", 0)
        rows = list(_rows(record, is_first=test != last_test))
        writer.writerows(rows)
        last_test = test
        return len(rows)

    with (
        replacing(Path(path)) as fresh,
        fresh.open("w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        yield add


def _rows(record: Mapping[str, Any], *, is_first: bool) -> Iterator[list[object]]:
    """Yield the rows of a comparison, in the order of the columns."""
    place = [_cell(record[name]) if is_first or name != "node" else "" for name in _PLACE]
    seconds = _cell(record["seconds"]) if is_first else ""
    if isinstance(seconds, float):
        seconds = float(f"{seconds:.3g}")
    passed = _cell(record["passed"])
    checks = binding_checks(record)
    values, ideal, accepted = record["values"], record["ideal"] or {}, record["accepted"] or {}
    reason = record.get("reason") or {}
    for metric in dict.fromkeys([*values, *checks]):
        check = checks.get(metric, {})
        value = values.get(metric, check.get("text") or check.get("value"))
        yield [
            *place,
            _cell(metric),
            _cell(value if value is not None else reason.get(f"/values/{metric}")),
            _cell(ideal.get(metric)),
            _cell(accepted.get(metric)),
            *(_limit_cells(check) if check else _NO_LIMIT),
            passed,
            seconds,
        ]
        place[_NODE] = seconds = ""


def _limit_cells(check: Mapping[str, Any]) -> list[object]:
    cells = [_cell(check.get(name)) for name in (*_LIMIT, "passed")]
    cells[_BOUND] = _cell(check.get("accepted_text") or check["bound"])
    return cells


_NAMES = ("nan", "inf", "-inf")


def _cell(value: object) -> object:
    """Return the value of a cell, with names for numbers that are not finite."""
    if value is None:
        return ""
    if isinstance(value, float):
        # As many digits as tell one float32 from the next.
        return float(f"{value:.9g}")  # which the writer calls nan, inf or -inf
    return _text_cell(value) if isinstance(value, str) else for_csv(value)


@functools.lru_cache(maxsize=2**14)
def _text_cell(text: str) -> object:
    """Return the cell of a text; most stand in many rows."""
    return text if text in _NAMES else for_csv(text)
