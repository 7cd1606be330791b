"""An error that no quantizer of the declared format can make is no improvement."""

from __future__ import annotations

import pytest

from qgate.gate import Limits, Measured, failure_text, judge
from qgate.gate.texts import first_line


def site(value: float) -> Measured:
    return Measured(
        site="layers.0.up:output",
        layer="layers.0",
        scope="local",
        values={"relative_mse": value},
        order=0,
        nonfinite=0,
        ideal={"relative_mse": 1e-3},
        quantizer="int8",
        gated=(),
    )


@pytest.mark.parametrize(
    ("decibels", "passes"),
    [(-60, False), (-0.51, False), (-0.49, True), (0.49, True), (0.51, False)],
)
def test_the_budget_has_two_sides(decibels: float, passes: bool) -> None:
    verdict = judge([site(1e-3 * 10 ** (decibels / 10))], lambda _: Limits(), True)
    assert verdict.passed is passes
    if decibels < 0 and not passes:
        assert "better than an ideal int8 quantizer: nothing is quantized here" in first_line(
            verdict, "int8"
        )


@pytest.mark.parametrize(("decibels", "shown"), [(-6.66, "-6.7"), (-0.52, "-0.52"), (6.66, "6.7")])
def test_the_row_says_how_far_from_the_ideal_it_is(decibels: float, shown: str) -> None:
    verdict = judge([site(1e-3 * 10 ** (decibels / 10))], lambda _: Limits(), True)
    assert f"  {shown} dB  " in failure_text(verdict, "int8").splitlines()[3]
