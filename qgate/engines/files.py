"""Write the files of a comparison: the page, the record and all tokens, each as a whole.

Tables of all tokens and of all steps are CSV.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from qgate.engines.page import page
from qgate.engines.record import EnginesRecord, TokenRow
from qgate.engines.series_page import page as series_page
from qgate.engines.series_record import SeriesRecord, StepDistances
from qgate.engines.sync_page import page as sync_page
from qgate.engines.sync_record import SyncRecord
from qgate.records.plain_data import json_text
from qgate.storage.output import write_all
from qgate.text import as_csv

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


def tokens_csv(rows: Iterable[TokenRow]) -> str:
    """Write one row per token."""
    return as_csv(TokenRow._fields, (row._asdict() for row in rows))


def steps_csv(steps: Iterable[StepDistances]) -> str:
    """Write one row per step, the quarters of samples in columns of their own."""
    names = [field.name for field in fields(StepDistances) if field.name != "quarters"]
    quarters = [f"k3_quarter_{number}" for number in range(1, 5)]
    rows = ({**asdict(s), **dict(zip(quarters, s.quarters, strict=True))} for s in steps)
    return as_csv([*names, *quarters], ({n: r[n] for n in (*names, *quarters)} for r in rows))
