"""Verdicts: boundaries, what is not finite, what is missing, what improved, where it enters."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from qgate.errors import QgateError
from qgate.gate import Check, Limits, Measured, Verdict, decide_update, judge, parse_bound
from tests.gate.making import ACCEPTED, carried, measured, verdict

FLOOR = 1e-12
BAD = (None, math.nan, math.inf, -math.inf)
SHARE = "flushed_share"


def kinds(*sites: Measured, **limits: Any) -> list[str]:
    return [check.kind for check in verdict(*sites, **limits).failed]


def both_sides(make: Any, edge: float, kind: str, **limits: Any) -> None:
    """A value equal to the bound passes, the next float fails for this limit."""
    assert kind not in kinds(make(edge), **limits)
    assert kind in kinds(make(math.nextafter(edge, math.inf)), **limits)


def test_a_good_site_passes_on_all_its_checks() -> None:
    judged = verdict(measured())
    assert judged.passed
    assert [(c.metric, c.kind) for c in judged.checks] == [
        ("one_minus_correlation", "regression"),
        ("relative_mse", "budget"),
        ("relative_mse", "regression"),
    ]


@pytest.mark.parametrize("same", [True, False])
def test_the_regression_limit_is_a_share_of_the_accepted_error(same: bool) -> None:
    bound = 1e-4 + ((0.02 if same else 0.05) * 1e-4 + 1e-14 + FLOOR)
    both_sides(lambda mse: carried(mse=mse, floor=FLOOR), bound, "regression", same=same)
    assert verdict(carried(), same=same).checks[0].source == "default"


@pytest.mark.parametrize(
    ("tokens", "whole", "part"),
    [(0, 1, 1), (20_000, 1, 1), (5_120, 1, 1), (1_280, 2, 4), (256, 20**0.5, 5), (1, 5, 5)],
)
def test_the_tolerance_of_carried_errors_grows_for_few_tokens(
    tokens: int, whole: float, part: float
) -> None:
    name = "relative_mse@worst_channel"
    site: dict[str, Any] = {"positions": (tokens // 2, tokens - tokens // 2)}
    both_sides(lambda mse: carried(mse=mse, **site), bound_of(whole), "regression")
    both_sides(lambda mse: measured(mse=mse, ideal=None, **site), bound_of(1), "regression")
    site["accepted"] = {**ACCEPTED, name: 1e-4}
    both_sides(
        lambda worst: carried(parts={"worst_channel": {"relative_mse": worst}}, **site),
        bound_of(part),
        "regression",
    )


def bound_of(times: float) -> float:
    return 1e-4 + (0.02 * times * 1e-4 + 1e-14)


def test_the_budget_is_above_ideal_and_noise_floor() -> None:
    bound = (1e-4 + FLOOR) * 10**0.05
    both_sides(lambda mse: measured(mse=mse, floor=FLOOR), bound, "budget")
    wide = (1e-4 + FLOOR) * 10**0.3
    both_sides(lambda mse: measured(mse=mse, floor=FLOOR), wide, "budget", budget_db=3.0)


@pytest.mark.parametrize("floor", [0.0, FLOOR])
def test_where_the_ideal_is_exact_only_the_noise_is_allowed(floor: float) -> None:
    def make(mse: float) -> Measured:
        return measured(mse=mse, ideal={"relative_mse": 0.0}, floor=floor)

    both_sides(make, floor, "budget", budget_db=20.0)


@pytest.mark.parametrize("scope", ["carried", "backward", "sweep"])
def test_the_budget_is_for_local_errors_alone(scope: str) -> None:
    assert "budget" in kinds(measured(mse=1.0))
    assert "budget" not in kinds(measured(mse=1.0, scope=scope))
    assert "budget" not in kinds(measured(mse=1.0, ideal=None))


@pytest.mark.parametrize(
    "ideal", [{"relative_mse": math.nan}, {"relative_mse": math.inf}, {"relative_mse": -1.0}, {}]
)
def test_an_ideal_error_that_is_none_lets_nothing_pass(ideal: dict[str, float]) -> None:
    assert kinds(measured(mse=8e-5, ideal=ideal)) == ["budget"]


def test_absolute_bounds_hold_where_they_are_given() -> None:
    both_sides(
        lambda mse: carried(mse=mse), 1e-3, "absolute", bound=parse_bound("relative_mse<1e-3")
    )
    good = parse_bound("correlation>0.999")
    values = {"relative_mse": 1e-4, "correlation": 0.999, "one_minus_correlation": 5e-5}
    assert verdict(carried(values=values), bound=good).passed
    below = {**values, "correlation": math.nextafter(0.999, 0)}
    assert kinds(carried(values=below), bound=good) == ["absolute"]
    assert kinds(carried(), bound=good) == ["absolute"], "a bound metric that was not computed"


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("metric", ["relative_mse", "one_minus_correlation"])
@pytest.mark.parametrize("scope", ["local", "carried", "backward", "sweep"])
def test_a_value_that_is_not_finite_fails_whatever_was_accepted(
    metric: str, scope: str, value: float | None
) -> None:
    values = {"relative_mse": 1e-4, "one_minus_correlation": 5e-5, metric: value}
    for accepted in (ACCEPTED, {**ACCEPTED, metric: value if value is not None else math.nan}):
        judged = verdict(measured(scope=scope, values=values, accepted=accepted))
        assert not judged.passed
        assert judged.failed[0].kind in ("nonfinite", "budget")
        assert judged.failed[0].metric == metric


@pytest.mark.parametrize("accepted", [math.nan, math.inf, -math.inf])
def test_an_accepted_value_that_is_not_finite_lets_nothing_pass(accepted: float) -> None:
    assert kinds(carried(accepted={**ACCEPTED, "relative_mse": accepted})) == ["regression"]
    assert kinds(carried(mse=0.0, accepted={**ACCEPTED, "relative_mse": accepted})) == [
        "regression"
    ]


def test_one_plus_a_tolerance_that_overflows_lets_nothing_pass() -> None:
    huge = 1.79e308
    assert kinds(carried(mse=1.0, accepted={**ACCEPTED, "relative_mse": huge})) == ["regression"]


@pytest.mark.parametrize("field", ["nonfinite", "nonfinite_reference"])
def test_non_finite_elements_fail_on_their_own(field: str) -> None:
    judged = verdict(measured(**{field: 1}), measured("b", mse=1.0))
    assert (judged.failed[0].kind, judged.failed[0].metric) == ("nonfinite", field)
    assert [c.kind for c in judged.checks if not c.passed and c.site != "b"] == ["nonfinite"]


def test_a_missing_baseline_is_never_a_pass() -> None:
    for accepted in (None, {}):
        judged = verdict(carried(accepted=accepted, mse=0.0))
        assert [(c.metric, c.kind) for c in judged.failed] == [
            ("one_minus_correlation", "missing"),
            ("relative_mse", "missing"),
        ]
        assert {check.kind for check in judged.checks} == {"missing"}
    assert kinds(carried(accepted={"relative_mse": 1e-4})) == ["missing"]


def test_what_was_accepted_is_compared_also_where_it_need_not_be() -> None:
    accepted = {**ACCEPTED, "correlation": 0.999}
    assert kinds(carried(accepted=accepted)) == ["nonfinite"], "no longer computed"
    values = {"relative_mse": 1e-4, "one_minus_correlation": 5e-5, "correlation": 0.5}
    assert kinds(carried(values=values, accepted=accepted)) == ["regression"]
    with pytest.raises(QgateError, match=r"unknown metric 'relativ_mse'.*relative_mse"):
        verdict(carried(accepted={**ACCEPTED, "relativ_mse": 1.0}))


@pytest.mark.parametrize("part", ["worst_channel", "without_massive"])
def test_parts_are_shown_and_gated_once_accepted(part: str) -> None:
    key = f"relative_mse@{part}"
    options = {"parts": {part: {"relative_mse": 0.5}}}
    assert kinds(carried(**options)) == ["missing"], "its line was removed"
    assert kinds(carried(**options, accepted=None)) == ["missing"] * 2, "the site is new"
    assert kinds(carried(**options, accepted={**ACCEPTED, key: 0.4})) == ["regression"]
    assert verdict(carried(**options, accepted={**ACCEPTED, key: 0.5})).passed
    assert kinds(carried(accepted={**ACCEPTED, key: 0.5})) == ["nonfinite"]
    accepted_row = carried(**options, accepted={**ACCEPTED, key: 0.5})
    assert kinds(accepted_row, bound=parse_bound(f"{key}<0.1")) == ["absolute"]
    whole = {"parts": {part: {"relative_mse": 1e-4}}}
    assert kinds(carried(**whole)) == (["missing"] if part == "worst_channel" else [])


def test_nothing_compared_is_not_green() -> None:
    assert kinds(carried(gated=(), accepted=None)) == ["nothing"]
    with pytest.raises(QgateError, match="nothing was measured"):
        verdict()
    with pytest.raises(QgateError, match="given 2 times"):
        verdict(measured(), measured())
    with pytest.raises(QgateError, match="given 2 times"):
        judge([measured()], lambda _: Limits(), True, absent={("layers.0:output", "local"): ""})


def test_an_accepted_site_that_was_not_measured_fails() -> None:
    judged = judge([carried()], lambda _: Limits(), True, absent={("gone", "carried"): ""})
    assert [(c.site, c.kind) for c in judged.failed] == [("gone", "absent")]
    assert not judge([], lambda _: Limits(), True, absent={("gone", "carried"): ""}).passed


def test_an_improvement_passes_and_is_listed_up_to_half_the_error() -> None:
    edge = 1e-4 - (0.02 * 1e-4 + 1e-14)
    at, past = verdict(carried(mse=edge)), verdict(carried(mse=math.nextafter(edge, 0)))
    assert (at.passed, at.improved) == (True, ())
    assert (past.passed, [c.metric for c in past.improved]) == (True, ["relative_mse"])
    least = 1e-4 * (0.5 / 1.02) - 1e-14
    assert verdict(carried(mse=least)).improved
    (check,) = verdict(carried(mse=math.nextafter(least, 0))).failed
    assert (check.kind, check.side) == ("regression", ">=")
    assert check.reason.startswith("3.1 dB better than accepted: something else was computed")
    decided = decide_update(verdict(carried(mse=1e-5)))
    assert decided.passed, "an update accepts it"
    assert decided.values["layers.0:output", "carried", "relative_mse"] == 1e-5


@pytest.mark.parametrize(
    "row",
    [
        measured(scope="forward", ideal=None, mse=1e-4 * 1.01e-6),
        carried(gated=(), accepted={"relative_mse@worst_sample": 1e-4},
                parts={"worst_sample": {"relative_mse": 1e-4 * 1.01e-6}}),
    ],
)  # fmt: skip
def test_what_has_less_meaning_may_be_far_better(row: Measured) -> None:
    assert verdict(row).passed


@pytest.mark.parametrize("mse", [0.0, 1e-4 * 0.99e-6])
def test_an_error_that_is_all_but_gone_is_no_improvement(mse: float) -> None:
    """A quantized model that equals FP32 was not compared, or is not quantized."""
    judged = verdict(carried(mse=mse))
    (check,) = judged.failed
    assert (check.kind, check.side, check.reason) == (
        "regression",
        ">=",
        "nothing differs any more",
    )
    assert check in decide_update(judged).remaining or decide_update(judged).passed
    noise = verdict(
        carried(mse=0.0, accepted={"relative_mse": 9e-13, "one_minus_correlation": 5e-5})
    )
    assert noise.passed, "what was noise may be gone"


@pytest.mark.parametrize("scope", ["sweep", "backward"])
def test_what_is_to_stay_is_held_on_both_sides(scope: Any) -> None:
    def found(value: float) -> Verdict:
        row = measured(scope=scope, ideal=None, gated=(SHARE,), accepted={SHARE: 0.5})
        row = dataclasses.replace(row, values={SHARE: value})
        return judge([row], lambda _: Limits(), True)

    for value, passed in (
        (0.5, True),
        (0.5099, True),
        (0.4901, True),
        (0.511, False),
        (0.489, False),
    ):
        assert found(value).passed is passed
        assert found(value).improved == ()
    assert found(0.489).failed[0].side == ">="
    assert decide_update(found(0.489)).passed


def test_what_is_better_the_higher_is_held_from_below() -> None:
    accepted = {"bits_per_byte": 2.0, "kl_divergence": 0.1, "next_token_accuracy": 0.5}

    def task(accuracy: float) -> Measured:
        return carried(
            scope="task", values={**accepted, "next_token_accuracy": accuracy}, accepted=accepted
        )

    edge = 0.5 - (0.02 * 0.5 + 1e-14)
    assert verdict(task(edge)).passed
    assert kinds(task(math.nextafter(edge, 0))) == ["regression"]
    assert [c.metric for c in verdict(task(0.6)).improved] == ["next_token_accuracy"]


def test_a_negative_accepted_value_widens_outward_and_a_signed_one_by_magnitude() -> None:
    def one(metric: str, value: float) -> Measured:
        return carried(values={metric: value}, gated=(metric,), accepted={metric: -10.0})

    def passed(site: Measured) -> bool:
        return judge([site], lambda _: Limits(), True).passed

    assert [passed(one("sqnr_db", v)) for v in (-10.1, -10.3, 50.0)] == [True, False, True]
    assert [passed(one("mean_error", v)) for v in (10.1, -10.1, 10.3, -10.3, 0.0)] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_a_correlation_stands_for_one_minus_it() -> None:
    values = {"relative_mse": 1e-4, "correlation": 0.5}
    check = verdict(carried(values=values)).failed[0]
    assert (check.metric, check.value) == ("one_minus_correlation", 0.5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"scope": "lokal"}, "Did you mean local"),
        ({"floor": math.inf}, "noise floor inf"),
        ({"floor": math.nan}, "noise floor nan"),
        ({"floor": -1.0}, "noise floor -1"),
        ({"nonfinite": -1}, "nonfinite -1"),
        ({"nonfinite_reference": -1}, "nonfinite_reference -1"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(QgateError, match=words):
        measured(**given)


def test_checks_round_trip_through_json() -> None:
    site = measured(parts={"worst_channel": {"relative_mse": 0.5}}, gated=("relative_mse",))
    for check in verdict(site, measured("b", mse=1.0)).checks:
        assert Check(**json.loads(json.dumps(check.to_dict()))) == check
