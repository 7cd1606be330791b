"""Write the files of a comparison: the page, the record and the tables, each as a whole.

Tables have every weight, worst first, and every finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qgate.checkpoints.page import page
from qgate.checkpoints.record import CheckpointRecord, WeightRecord, ranked
from qgate.records.plain_data import json_text
from qgate.storage.output import write_all
from qgate.text import as_csv

if TYPE_CHECKING:
    from qgate.storage.locations import Location

PAGE = "checkpoint.html"
DRAWN = 6
"""Weights whose worst block is on the page."""

_WEIGHT = ("name", "format", "packing", "outcome", "matched", "method", "parents", "size",
           "count")  # fmt: skip
_ERRORS = ("over_ideal_db", "error", "cosine", "over_codes_db", "at_ends_share", "zero_share",
           "flushed_share", "not_finite", "unused_codes", "zero_blocks")  # fmt: skip
_SCALES = ("count", "smallest", "largest", "log2_ratio", "not_finite", "zero", "negative")


def write_files(folder: Location, record: CheckpointRecord) -> Location:
    """Write all files into a folder, the page last, and return the page."""
    files = {
        "checkpoint.json": json_text(record),
        "weights.csv": weights_csv(record),
        "findings.csv": findings_csv(record),
    }
    return write_all(folder, {**files, PAGE: page(record, list(files))})


def weights_csv(record: CheckpointRecord) -> str:
    """Write one row per weight."""
    columns = [*_WEIGHT, *_ERRORS, "worst_row", *(f"scales_{name}" for name in _SCALES)]
    return as_csv(columns, map(_weight_row, ranked(record.weights)))


def _weight_row(weight: WeightRecord) -> Mapping[str, object]:
    row: dict[str, object] = {name: getattr(weight, name) for name in _WEIGHT}
    row["parents"] = " ".join(weight.parents)
    if weight.figures is not None:
        row |= {name: getattr(weight.figures, name) for name in _ERRORS}
        row |= {f"scales_{name}": getattr(weight.figures.scales, name) for name in _SCALES}
        row["worst_row"] = weight.figures.worst_row[0] if weight.figures.worst_row else None
    return row


def findings_csv(record: CheckpointRecord) -> str:
    """Write one row per finding."""
    return as_csv(("subject", "cause", "over_ideal_db"), map(vars, record.findings))
