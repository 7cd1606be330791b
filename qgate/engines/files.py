"""Write the files of a comparison: the page, the record and all tokens, each as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from qgate.engines.page import page
from qgate.engines.record import EnginesRecord, TokenRow
from qgate.engines.tables import tokens_csv
from qgate.records.plain_data import json_text
from qgate.storage.output import write_all

if TYPE_CHECKING:
    from qgate.storage.locations import Location

PAGE = "engines.html"
DRAWN = 6
"""Samples that are drawn on the page."""


def write_files(folder: Location, record: EnginesRecord, rows: Iterable[TokenRow]) -> Location:
    """Write all files into a folder, the page last, and return the page."""
    files = {"engines.json": json_text(record), "tokens.csv": tokens_csv(rows)}
    return write_all(folder, {**files, PAGE: page(record, list(files))})
