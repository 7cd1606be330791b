"""Write the files of a comparison: the page, the record and all tokens, each as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from qgate.engines.page import page
from qgate.engines.record import EnginesRecord, TokenRow
from qgate.engines.series_page import page as series_page
from qgate.engines.series_record import SeriesRecord
from qgate.engines.sync_page import page as sync_page
from qgate.engines.sync_record import SyncRecord
from qgate.engines.tables import steps_csv, tokens_csv
from qgate.records.plain_data import json_text
from qgate.storage.output import write_all

if TYPE_CHECKING:
    from qgate.storage.locations import Location

PAGE, SERIES_PAGE, SYNC_PAGE = "engines.html", "series.html", "sync.html"
DRAWN = 6
"""Samples that are drawn on the page."""


def write_files(folder: Location, record: EnginesRecord, rows: Iterable[TokenRow]) -> Location:
    """Write all files into a folder, the page last, and return the page."""
    files = {"engines.json": json_text(record), "tokens.csv": tokens_csv(rows)}
    return write_all(folder, {**files, PAGE: page(record, list(files))})


def write_series(folder: Location, series: SeriesRecord) -> Location:
    """Write the files of a series into a folder, the page last, and return the page."""
    files = {"series.json": json_text(series), "steps.csv": steps_csv(series.steps)}
    return write_all(folder, {**files, SERIES_PAGE: series_page(series, list(files))})


def write_sync(folder: Location, record: SyncRecord) -> Location:
    """Write the files of a sync into a folder, the page last, and return the page."""
    files = {"sync.json": json_text(record)}
    return write_all(folder, {**files, SYNC_PAGE: sync_page(record, list(files))})
