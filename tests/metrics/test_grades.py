"""The bands of metrics in the records of block errors; a failure has the figures alone."""

from __future__ import annotations

from typing import Any

import pytest

from qgate.gate import failure_text
from qgate.gate.sessions import record_rows
from qgate.metrics.grades import grades_of
from tests.gate.making import ACCEPTED, carried, measured, verdict


def graded(mse: float | None, correlation: float | None, **given: Any) -> Any:
    values = {**ACCEPTED, "relative_mse": 1.0}
    values |= {} if mse is None else {"mse": mse}
    values |= {} if correlation is None else {"correlation": correlation}
    return carried(values=values, **given)


def line(*sites: Any) -> str | None:
    lines = [raw_line.strip() for raw_line in failure_text(verdict(*sites), "2-1").splitlines()]
    return next((text_line for text_line in lines if text_line.startswith("carried: ")), None)


@pytest.mark.parametrize(
    ("mse", "correlation", "expected"),
    [
        (3.1e-3, 0.9981, "carried: MSE 3.1e-03, correlation 0.9981"),
        (2e-5, 0.99991, "carried: MSE 2.0e-05, correlation 0.99991"),
        (1e-5, None, "carried: MSE 1.0e-05"),
        (None, 0.9995, "carried: correlation 0.9995"),
        (None, None, None),
        (float("nan"), float("nan"), "carried: MSE nan, correlation nan"),
        (0.0, 1.0, "carried: MSE 0, correlation 1"),
    ],
)
def test_one_line_of_a_failure_has_what_is_carried_without_grades(
    mse: Any, correlation: Any, expected: Any
) -> None:
    assert line(graded(mse, correlation)) == expected


def test_of_several_carried_sites_the_worst_is_written() -> None:
    values = {**ACCEPTED, "relative_mse": 1.0, "mse": 0.5, "correlation": 0.1}
    assert line(measured(values=values)) is None
    small = graded(1e-5, 0.99995, site="a", order=1)
    large = graded(5e-3, 0.995, site="b", order=0)
    assert line(measured(values=values), small, large) == "carried: MSE 5.0e-03, correlation 0.995"


def test_no_verdict_reads_grades() -> None:
    good = {**ACCEPTED, "mse": 0.5, "correlation": 0.1}
    assert verdict(carried(values=good)).passed


@pytest.mark.parametrize("scope", ["carried", "local", "backward", "sweep"])
def test_records_of_block_errors_have_grades(scope: str) -> None:
    values = {**ACCEPTED, "mse": 2e-4, "correlation": 0.995}
    judgement = verdict(
        measured(scope=scope, values=values, ideal=None), measured("bare", scope=scope, ideal=None)
    )
    rows = {row["site"]: row for row in record_rows("suite", "m", "2-1", "layers.0", judgement, ())}
    expected_grades = (
        {"mse": "good", "correlation": "fair"} if scope in ("carried", "local") else None
    )
    assert rows["layers.0:output"].get("grades") == expected_grades
    assert "grades" not in rows["bare"]
    assert grades_of({"mse": 2e-4}) == {"mse": "good"}
