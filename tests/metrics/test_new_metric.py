"""A new metric is one literal: it then stands in every table, CSV file and page."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from qgate.errors import QgateError
from qgate.formats import get
from qgate.gate import Measured, Policy, failure_text, judge, parse_bound
from qgate.metrics import METRICS, Metric
from qgate.stats import errors
from qgate.sweeps.compute import sweep
from qgate.sweeps.files import write
from qgate.sweeps.findings import entry_of
from qgate.sweeps.page import page
from qgate.sweeps.texts import lines, results_text

NAME, LABEL, UNIT = "peak_to_mean", "Peak to Mean", "mV"


@pytest.fixture
def added() -> Iterator[Metric]:
    """The largest error less the mean one, in the unit of the data."""
    metric = METRICS.add(
        Metric(
            name=NAME,
            label=LABEL,
            unit=UNIT,
            direction="lower",
            degree=1,
            definition="max |a - r| - mean |a - r|",
            formula=lambda s: (s.max_abs_error - s.sum_abs_error / s.count) * s.scale_error,
        )
    )
    yield metric
    METRICS.remove(NAME)
    assert NAME not in METRICS.names()
    with pytest.raises(QgateError, match="unknown metric"):
        METRICS.get(f"{NAME}@worst_channel")


def data() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(4096, generator=generator, dtype=torch.float64) * 1e-200


def by_hand(x: torch.Tensor, exponent: int) -> float:
    """Written out in numbers of ordinary size: float64 has no squares of 1e-200."""
    values = np.ldexp(x.numpy(), 664)
    unit = 2.0 ** (exponent + 664)
    rounded = get("fp8_e4m3").nearest(torch.from_numpy(values / unit)).numpy() * unit
    error = np.abs(rounded - values)
    return math.ldexp(float(error.max() - error.mean()), -664)


@pytest.mark.usefixtures("added")
def test_a_new_metric_with_a_unit_is_right_for_numbers_of_1e_200() -> None:
    swept = sweep(data(), "fp8_e4m3")
    for level in swept.levels[::5]:
        expected = by_hand(data(), int(level["exponent"]))
        assert level["metrics"][NAME] == pytest.approx(expected, rel=1e-9)
        assert 1e-206 < expected < 1e-198


def test_it_stands_in_the_csv_the_texts_and_the_page_of_a_sweep(
    added: Metric, tmp_path: Path
) -> None:
    record = sweep(data(), "fp8_e4m3", name="x").to_dict()
    best = record["levels"][record["advice"]["recommended"]]
    value = float(best["metrics"][NAME])
    written = {path.suffix: path.read_text() for path in write(tmp_path, record)}
    rows = list(csv.DictReader(io.StringIO(written[".csv"])))
    assert value in [float(row[NAME]) for row in rows]
    assert f"{LABEL} {UNIT}" in results_text(record)
    assert added.cell(value) in results_text(record)
    assert f"- {LABEL}: {added.text(value)}" in "\n".join(lines(record))
    assert UNIT in added.text(value)
    html = page([entry_of(record, "x", [])], [("x", None)], "all", {})
    assert f"{LABEL} {UNIT}" in html
    assert f">{added.cell(value)}</td>" in html


@pytest.mark.usefixtures("added")
def test_it_stands_in_errors_and_comparisons() -> None:
    x = torch.linspace(-1, 1, 101, dtype=torch.float64)
    stats = errors(x * 1.01, x)
    assert stats.metrics()[NAME] == pytest.approx(0.01 * (1 - float(x.abs().mean())))
    assert LABEL in str(stats)


@pytest.mark.usefixtures("added")
def test_a_gate_takes_it_whole_and_of_a_part() -> None:
    assert parse_bound(f"{NAME}<1e-3").metric == NAME
    values = {NAME: 3e-200}
    row = Measured(
        site="x:output", layer="x", scope="carried", order=0, nonfinite=0, values=values,
        gated=(NAME,), accepted={NAME: 1e-200, f"{NAME}@worst_channel": 1e-200},
        parts={"worst_channel": {NAME: 5e-200}},
    )  # fmt: skip
    policy = Policy.from_table({"atol": 0.0})
    verdict = judge([row], policy.limits_of("m"), True)
    assert sorted(check.metric for check in verdict.failed) == [NAME, f"{NAME}@worst_channel"]
    assert NAME in failure_text(verdict, "m")
