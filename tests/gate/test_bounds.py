"""Bounds: what is read, what is refused, and that only a finite value within them holds."""

from __future__ import annotations

import math

import pytest

from qgate.errors import QgateError
from qgate.gate import Limits, Measured, judge, parse_bound
from qgate.gate.policy import within
from qgate.metrics import METRICS
from qgate.metrics.grades import grade_of

COMPARED = [metric.name for metric in METRICS if metric.direction != "equal"]
BAD_VALUES = (None, math.nan, math.inf, -math.inf)


@pytest.mark.parametrize(
    ("text", "metric", "side", "value"),
    [
        ("relative_mse<1e-3", "relative_mse", "<=", 1e-3),
        ("relative_mse <= .001", "relative_mse", "<=", 1e-3),
        ("correlation>0.999", "correlation", ">=", 0.999),
        (" correlation >= 0.999 ", "correlation", ">=", 0.999),
        ("relative_mse@worst_channel<0.1", "relative_mse@worst_channel", "<=", 0.1),
    ],
)
def test_a_bound_is_read(text: str, metric: str, side: str, value: float) -> None:
    bound = parse_bound(text)
    assert (bound.metric, bound.side, bound.value) == (metric, side, value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("relative_mse", ["'relative_mse'", "relative_mse<1e-3", "correlation>0.999"]),
        ("relative_mse==1", ["'relative_mse==1'", "Write a metric"]),
        ("", ["''", "Write a metric"]),
        ("relativ_mse<1", ["'relativ_mse'", "Did you mean relative_mse", "Allowed:"]),
        ("relative_mse@best<1", ["'best'", "without_massive, worst_channel"]),
        ("relative_mse<abc", ["'abc'", "finite number"]),
        ("relative_mse<nan", ["'nan'", "finite number"]),
        ("relative_mse<inf", ["'inf'", "finite number"]),
        ("relative_mse>1e-3", ["better the lower", "'relative_mse<=1e-3'"]),
        ("exponent<3", ["none is better than another"]),
        ("exponent>3", ["none is better than another"]),
        ("correlation<0.9", ["better the higher", "'correlation>=0.9'"]),
    ],
)
def test_a_bad_bound_is_repeated_with_what_is_allowed(text: str, words: list[str]) -> None:
    with pytest.raises(QgateError) as caught:
        parse_bound(text)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("metric", COMPARED)
def test_every_registered_metric_can_be_bound(metric: str) -> None:
    side = ">" if METRICS.get(metric).direction == "higher" else "<"
    bound = parse_bound(f"{metric}{side}0.5")
    assert bound.holds(0.5)
    assert not bound.holds(math.nextafter(0.5, -1 if side == ">" else 1))


def test_a_signed_metric_is_held_by_its_magnitude() -> None:
    bound = parse_bound("mean_error<0.5")
    assert bound.holds(-0.5)
    assert not bound.holds(-0.6)
    with pytest.raises(QgateError, match="never below 0"):
        parse_bound("mean_error<-1")


@pytest.mark.parametrize("text", ["relative_mse<1e300", "correlation>-1e300"])
@pytest.mark.parametrize("value", BAD_VALUES)
def test_what_is_not_finite_never_holds(text: str, value: float | None) -> None:
    assert parse_bound(text).holds(0.5)
    assert not parse_bound(text).holds(value)


@pytest.mark.parametrize("bound", [math.nan, math.inf])
def test_a_bound_that_is_not_finite_lets_nothing_pass(bound: float) -> None:
    assert not within(0.0, "<=", bound)
    assert not within(0.0, ">=", -bound)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"budget_db": -1}, "budget_db = -1"),
        ({"budget_db": math.inf}, "budget_db = inf"),
        ({"budget_db": math.nan}, "budget_db = nan"),
        ({"budget_db": True}, "budget_db = True"),
        ({"budget_db": "0.5"}, "budget_db = '0.5'"),
        ({"regression": 2}, "0.02 is 2 %"),
        ({"regression_other_device": -0.1}, "0.05 is 5 %"),
        ({"atol": math.inf}, "atol = inf"),
        ({"missing": "pass"}, "'pass' is not allowed"),
    ],
)
def test_limits_that_would_let_all_pass_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(QgateError, match="is not allowed") as caught:
        Limits(**given)  # type: ignore[arg-type]
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("mse", [(0.0, "excellent"), (9.9e-5, "excellent"), (1e-4, "good"), (1e-3, "fair"), (1e-2, "poor"), (math.inf, "poor"), (math.nan, "poor"), (-math.inf, "poor"), (None, "poor")]),
        ("correlation", [(1.0, "excellent"), (0.9999, "good"), (0.999, "fair"), (0.99, "poor"), (-1.0, "poor"), (math.nan, "poor"), (math.inf, "poor"), (None, "poor")]),
    ],
)  # fmt: skip
def test_grades(metric: str, values: list[tuple[float | None, str]]) -> None:
    assert [(value, grade_of(metric, value)) for value, _ in values] == values


@pytest.mark.parametrize("element", [1 / 1024, 1 / 4])
@pytest.mark.parametrize(
    ("same", "elements", "passes"),
    [(False, 0, True), (False, 4, True), (False, 5, False), (True, 2, True), (True, 1, False),
     (True, 3, False)],
)  # fmt: skip
def test_other_arithmetic_may_move_two_elements(
    element: float, same: bool, elements: int, passes: bool
) -> None:
    """Of a small tensor one element is more than any share of the accepted value."""
    site = Measured(
        site="up:input", layer="layers.0", scope="sweep", order=0, nonfinite=0, grain=element,
        values={"flushed_share": elements * element}, gated=("flushed_share",),
        accepted={"flushed_share": 2 * element},
    )  # fmt: skip
    assert judge([site], lambda _: Limits(), same).passed is passes
