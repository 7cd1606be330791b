"""Records as a flat table, one row per site and metric."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qgate.results.ranking import binding_checks, bound_of, value_of
from qgate.storage.files import replacing
from qgate.text import for_csv

COLUMNS = (
    "suite", "node", "model", "mode", "layer", "site", "scope", "metric", "value", "ideal",
    "accepted", "side", "bound", "times", "kind", "improved", "metric_passed", "passed", "seconds",
)  # fmt: skip
_SAME = ("suite", "node", "model", "mode", "layer", "site", "scope", "passed", "seconds")


def to_csv(records: Iterable[Mapping[str, Any]], path: Path | str) -> int:
    """Write the table and return its number of rows.

    A metric with several limits shows the binding one; a number that is not finite is shown by its
    name, a missing one is empty. Names that a spreadsheet would take for a formula get an
    apostrophe.
    """
    count = 0
    with (
        replacing(Path(path)) as fresh,
        fresh.open("w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for record in records:
            for row in _rows(record):
                writer.writerow({name: _cell(value) for name, value in row.items()})
                count += 1
    return count


def _rows(record: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    same = {name: record[name] for name in _SAME}
    checks = binding_checks(record)
    reason = record.get("reason") or {}
    for metric in dict.fromkeys([*record["values"], *checks]):
        check = checks.get(metric, {})
        value = record["values"].get(metric, value_of(check) if check else None)
        yield {
            **same,
            "metric": metric,
            "value": value if value is not None else reason.get(f"/values/{metric}"),
            "ideal": (record["ideal"] or {}).get(metric),
            "accepted": (record["accepted"] or {}).get(metric),
            **{name: check.get(name) for name in ("side", "bound", "times", "kind", "improved")},
            **({"bound": bound_of(check)} if check else {}),
            "metric_passed": check.get("passed"),
        }


_NAMES = ("nan", "inf", "-inf")


def _cell(value: object) -> object:
    """Return the value of a cell, with names for numbers that are not finite."""
    odd = isinstance(value, float) and not math.isfinite(value)
    return str(value) if odd or (isinstance(value, str) and value in _NAMES) else for_csv(value)
