"""A number that has to be the accepted one: neither better nor worse, the same or another."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from qgate.gate import Measured, Verdict, decide_update, failure_text, first_line
from qgate.gate.policy import times_over
from tests.gate.making import measured, verdict

ACCEPTED = {"exponent": 2.0}
WHY = {"exponent": "the accepted one now costs 1.3 dB more"}


def swept(exponent: float | None, accepted: Any = ACCEPTED, **given: Any) -> Measured:
    fields = {"scope": "sweep", "values": {"exponent": exponent}, "gated": ("exponent",)}
    return measured("up:weight", ideal=None, accepted=accepted, **{**fields, **given})


@pytest.mark.parametrize("value", [2.0, -7.0, 0.0])
def test_the_same_passes_and_is_no_improvement(value: float) -> None:
    judged = verdict(swept(value, {"exponent": value}))
    assert judged.passed
    assert judged.improved == ()
    assert judged.checks[0].times == 0


@pytest.mark.parametrize("value", [3.0, 1.0, 2.0000001, -2.0, 0.0, 1e300])
def test_another_one_fails_in_either_direction_whatever_the_tolerance(value: float) -> None:
    judged = verdict(swept(value), regression=1.0, regression_other_device=1.0, atol=10.0)
    (check,) = judged.failed
    assert (check.kind, check.side, check.bound, check.improved) == ("regression", "==", 2.0, False)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_not_finite_fails_even_if_it_was_accepted(value: float | None) -> None:
    for accepted in (2.0, math.nan if value is None else value):
        assert [check.kind for check in verdict(swept(value, {"exponent": accepted})).failed] == [
            "nonfinite"
        ]
    assert not verdict(swept(2.0, {"exponent": math.nan})).passed


@pytest.mark.parametrize(
    ("value", "accepted", "why", "line"),
    [
        (
            3.0,
            2.0,
            WHY,
            "exponent 3 instead of 2 at up:weight (format mxfp8_e4m3): the accepted one now costs 1.3 dB more",
        ),
        (-3.0, -12.0, None, "exponent -3 instead of -12 at up:weight (format mxfp8_e4m3)"),
        (0.5, 0.0, None, "exponent 0.5 instead of 0 at up:weight (format mxfp8_e4m3)"),
    ],
)
def test_the_first_line_names_both(value: float, accepted: float, why: Any, line: str) -> None:
    judged = verdict(swept(value, {"exponent": accepted}, why=why))
    assert first_line(judged, "mxfp8_e4m3", label="format") == line


def test_the_table_shows_the_step_and_the_command_is_offered() -> None:
    message = failure_text(
        verdict(swept(3.0, why=WHY)), "mxfp8_e4m3", label="format", command="pytest -u"
    )
    row = message.splitlines()[3].split()
    assert row == ["up:weight", "sweep", "exponent", "2", "3", "+1", "==", "2", "regression"]
    assert "if intended: pytest -u" in message


def test_an_update_accepts_another_one() -> None:
    key = ("up:weight", "sweep", "exponent")
    update = decide_update(verdict(swept(3.0)))
    assert update.values == {key: 3.0}
    assert update.passed
    assert [(change.state, change.old, change.new) for change in update.changes] == [
        ("worse", 2.0, 3.0)
    ]
    assert decide_update(verdict(swept(3.0)), "new").values == {}
    assert decide_update(verdict(swept(2.0))).values == {}
    assert decide_update(verdict(swept(2.0)), "all").values == {key: 2.0}
    assert decide_update(verdict(swept(2.0, None))).values == {key: 2.0}


def test_it_comes_before_what_is_over_by_times() -> None:
    site = swept(3.0, {**ACCEPTED, "relative_mse": 1e-4}, gated=("exponent", "relative_mse"))
    judged = verdict(replace(site, values={"exponent": 3.0, "relative_mse": 1.0}))
    assert [check.metric for check in judged.failed] == ["exponent", "relative_mse"]


# Logarithms: a difference is a factor, whatever their sign -----------------------------------------

FORWARD = "layers.0.fc:forward.input"


def drift(value: float, accepted: float, **limits: float) -> Verdict:
    row = measured(
        FORWARD, scope="forward", values={"log2_mean": value}, ideal=None,
        accepted={"log2_mean": accepted}, gated=("log2_mean",), why={"log2_mean": ""},
    )  # fmt: skip
    return verdict(row, **limits)


@pytest.mark.parametrize("accepted", [-7.0, 0.0, 0.3, 12.0])
@pytest.mark.parametrize(
    ("limits", "octaves"), [({"regression": 0.0, "atol": 0.5}, 0.5), ({}, 0.02857)]
)
def test_the_allowed_drift_is_the_same_factor_everywhere_and_both_ways(
    accepted: float, limits: dict[str, float], octaves: float
) -> None:
    for sign in (1, -1):
        assert drift(accepted + sign * octaves * 0.99, accepted, **limits).passed
        assert not drift(accepted + sign * octaves * 1.01, accepted, **limits).passed


def test_it_is_told_as_a_factor() -> None:
    doubled, halved = (drift(-3.0 + by, -3.0, regression=0.0, atol=0.5) for by in (1, -1))
    assert first_line(doubled, "values", label="dump") == (
        f"log2_mean -2 > -2.5 at {FORWARD} (dump values): 2x accepted, up to 1.41x allowed"
    )
    assert first_line(halved, "values", label="dump") == (
        f"log2_mean -4 < -3.5 at {FORWARD} (dump values): 0.5x accepted, down to 0.707x allowed"
    )
    assert doubled.failed[0].times == pytest.approx(2**0.5)
    assert halved.failed[0].times == pytest.approx(2**0.5)


def test_times_over_never_overflows() -> None:
    assert times_over("log2_mean", 5000.0, "<=", -200.0) == 2.0**999
    assert times_over("log2_mean", -5000.0, "<=", 200.0) == 2.0**-999
    assert times_over("log2_mean", float("nan"), "<=", 0.0) == float("inf")
