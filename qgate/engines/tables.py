"""All tokens of a comparison, and all steps of a series, as CSV."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields

from qgate.engines.record import TokenRow
from qgate.engines.series_record import StepDistances
from qgate.text import as_csv


def tokens_csv(rows: Iterable[TokenRow]) -> str:
    """Write one row per token."""
    return as_csv(TokenRow._fields, (row._asdict() for row in rows))


def steps_csv(steps: Iterable[StepDistances]) -> str:
    """Write one row per step, the quarters of samples in columns of their own."""
    names = [field.name for field in fields(StepDistances) if field.name != "quarters"]
    quarters = [f"k3_quarter_{number}" for number in range(1, 5)]
    rows = ({**asdict(s), **dict(zip(quarters, s.quarters, strict=True))} for s in steps)
    return as_csv([*names, *quarters], ({n: r[n] for n in (*names, *quarters)} for r in rows))
