"""CHECKED.md says where each format was checked, and how many cases there are."""

from __future__ import annotations

import qgate
from tests.conformance import table


def test_the_table_is_up_to_date() -> None:
    text = table.DOCUMENT.read_text(encoding="utf-8")
    assert table.replaced(text) == text, "run python -m tests.conformance.table"


def test_every_counted_format_exists() -> None:
    for suite, counts in table.SUITES.items():
        assert set(counts) <= set(qgate.formats.names()), suite


def test_another_number_is_another_table() -> None:
    text = table.DOCUMENT.read_text(encoding="utf-8")
    row = next(line for line in table.rows() if line.startswith("| `nvfp4`"))
    stale = text.replace(row, row.replace("| 3 |", "| 4 |"))
    assert stale != text
    assert table.replaced(stale) == text
