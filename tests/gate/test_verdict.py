"""What a verdict over many sites says: worst first, where the error enters, in any order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from qgate.gate import Limits, Measured, judge, parse_bound
from qgate.results import binding
from tests.gate.making import ACCEPTED, carried, measured, verdict

errors = st.floats(0, 1e6, allow_subnormal=True)


def test_the_error_enters_at_the_first_local_one_that_is_out() -> None:
    sites = [
        carried("a", 1.0, order=0),
        measured("b", 0.1, order=2),
        measured("c", 9.0, order=3),
        measured("d", order=1),
    ]
    judgement = verdict(*sites)
    assert judgement.first_source == "b"
    assert judgement.failed[0].site == "a" or judgement.failed[0].site == "c"
    assert verdict(carried("a", 1.0), measured("b", order=1)).first_source is None
    assert verdict(measured("b", accepted=None)).first_source is None, "missing is not out"
    assert (
        verdict(measured("z", nonfinite=1, order=0), measured("b", 1.0, order=1)).first_source
        == "z"
    )


def test_failures_are_sorted_worst_first_and_missing_ones_last() -> None:
    sites = [
        carried("two", 2e-4),
        carried("nan", math.nan),
        carried("ten", 1e-3),
        carried("new", accepted=None),
        carried("count", nonfinite=3),
    ]
    order = list(dict.fromkeys(check.site for check in verdict(*sites).failed))
    assert order == ["count", "nan", "ten", "two", "new"]


def test_the_binding_check_is_the_worst_or_the_nearest() -> None:
    def bound(site: Measured) -> Mapping[str, Any]:
        check = binding({"checks": [check.to_dict() for check in verdict(site).checks]})
        assert check is not None
        return check

    tight = bound(measured(mse=1.019e-4))
    assert (tight["kind"], tight["passed"]) == ("regression", True)
    loose = bound(measured(accepted={"relative_mse": 1.8e-4, "one_minus_correlation": 9e-5}))
    assert loose["kind"] == "budget"
    assert bound(measured(mse=1.0))["passed"] is False


def test_all_sites_are_judged_each_by_its_own_limits() -> None:
    sites = [carried("a", 1.3e-4), carried("b", 1.3e-4)]
    judgement = judge(sites, lambda m: Limits(regression=0.5 if m.site == "a" else 0.02), True)
    assert [check.site for check in judgement.failed] == ["b"]
    assert {check.site for check in judgement.checks} == {"a", "b"}


@given(errors, errors, st.booleans(), errors, st.floats(0, 1))
def test_a_larger_error_never_turns_fail_into_pass(
    a: float, b: float, local: bool, accepted: float, floor: float
) -> None:
    small, large = sorted([a, b])
    make = measured if local else carried
    options: dict[str, Any] = {"accepted": {**ACCEPTED, "relative_mse": accepted}, "floor": floor}
    passed = [
        verdict(make(mse=mse, **options), bound=parse_bound("relative_mse<10")).passed
        for mse in (small, large)
    ]
    # An error that is far smaller than accepted is one of its own: something else was computed.
    far_better = [error < accepted / 2 for error in (small, large)]
    assert passed in ([True, True], [True, False], [False, False]) or far_better == [True, False]


@given(
    st.permutations(range(6)),
    st.lists(st.one_of(errors, st.just(math.nan)), min_size=6, max_size=6),
)
def test_the_order_of_the_sites_changes_nothing(order: list[int], values: list[float]) -> None:
    sites = [measured(f"s{n}", values[n], order=n // 2) for n in range(6)]
    straight, shuffled = verdict(*sites), verdict(*(sites[n] for n in order))
    assert straight == shuffled
    assert straight.failed == shuffled.failed
    assert straight.first_source == shuffled.first_source


@given(errors, errors)
def test_only_what_is_over_its_bound_is_more_than_once_over(value: float, accepted: float) -> None:
    check = verdict(carried(mse=value, accepted={**ACCEPTED, "relative_mse": accepted})).checks[1]
    assert check.times is not None
    assert check.bound is not None
    assert check.passed == (value <= check.bound if check.side == "<=" else value >= check.bound)
    assert check.times >= 1 if not check.passed else check.times <= 1
