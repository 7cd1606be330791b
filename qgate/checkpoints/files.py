"""Write the files of a comparison: the page, the record and the tables, each as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qgate.checkpoints.page import page
from qgate.checkpoints.record import CheckpointRecord
from qgate.checkpoints.tables import findings_csv, weights_csv
from qgate.records.plain_data import json_text
from qgate.storage.output import write_all

if TYPE_CHECKING:
    from qgate.storage.locations import Location

PAGE = "checkpoint.html"
DRAWN = 6
"""Weights whose worst block is on the page."""


def write_files(folder: Location, record: CheckpointRecord) -> Location:
    """Write all files into a folder, the page last, and return the page."""
    files = {
        "checkpoint.json": json_text(record),
        "weights.csv": weights_csv(record),
        "findings.csv": findings_csv(record),
    }
    return write_all(folder, {**files, PAGE: page(record, list(files))})
