"""Metrics that are logarithms: a difference is a factor, whatever their sign."""

from __future__ import annotations

import pytest

from qgate.gate import Limits, Measured, first_line, judge
from qgate.gate.limits import times_over

SITE = "layers.0.fc:forward.input"


def verdict(value: float, accepted: float, **limits: float):  # type: ignore[no-untyped-def]
    measured = Measured(
        site=SITE, layer="layers.0", scope="forward", values={"log2_mean": value}, order=0,
        nonfinite=0, accepted={"log2_mean": accepted}, gated=("log2_mean",), why={"log2_mean": ""},
    )  # fmt: skip
    return judge([measured], lambda _: Limits(**limits), True)


@pytest.mark.parametrize("accepted", [-7.0, 0.0, 0.3, 12.0])
@pytest.mark.parametrize(
    ("limits", "octaves"), [({"regression": 0.0, "atol": 0.5}, 0.5), ({}, 0.02857)]
)
def test_the_allowed_drift_is_the_same_factor_everywhere_and_both_ways(
    accepted: float, limits: dict[str, float], octaves: float
) -> None:
    for sign in (1, -1):
        assert verdict(accepted + sign * octaves * 0.99, accepted, **limits).passed
        assert not verdict(accepted + sign * octaves * 1.01, accepted, **limits).passed


def test_it_is_told_as_a_factor() -> None:
    doubled, halved = (verdict(-3.0 + by, -3.0, regression=0.0, atol=0.5) for by in (1, -1))
    assert first_line(doubled, "values", label="dump") == (
        f"log2_mean -2 > -2.5 at {SITE} (dump values): 2x accepted, up to 1.41x allowed"
    )
    assert first_line(halved, "values", label="dump") == (
        f"log2_mean -4 < -3.5 at {SITE} (dump values): 0.5x accepted, down to 0.707x allowed"
    )
    assert doubled.failed[0].times == pytest.approx(2**0.5)
    assert halved.failed[0].times == pytest.approx(2**0.5)


def test_times_over_never_overflows() -> None:
    assert times_over("log2_mean", 5000.0, "<=", -200.0) == 2.0**999
    assert times_over("log2_mean", -5000.0, "<=", 200.0) == 2.0**-999
    assert times_over("log2_mean", float("nan"), "<=", 0.0) == float("inf")
