"""All tokens of a comparison as CSV."""

from __future__ import annotations

from collections.abc import Iterable

from qgate.engines.record import TokenRow
from qgate.text import as_csv


def tokens_csv(rows: Iterable[TokenRow]) -> str:
    """Write one row per token."""
    return as_csv(TokenRow._fields, (row._asdict() for row in rows))
