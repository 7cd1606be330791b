"""The update table, cell by cell."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from qgate.errors import QgateError
from qgate.gate import WHICH, Limits, Measured, Verdict, decide_update, judge, parse_bound
from tests.gate.making import ACCEPTED, carried, measured

BOUND = parse_bound("relative_mse<1e-2", source="rule 1")
KEY = ("layers.0:output", "carried", "relative_mse")
OTHER = ("layers.0:output", "carried", "one_minus_correlation")


def judged(*sites: Measured, absent: Any = None) -> Verdict:
    limits = Limits(absolute={"relative_mse": BOUND})
    return judge(sites, lambda m: limits if m.scope == "carried" else Limits(), True, absent=absent)


# state → what is measured there, whether it passes without a flag
STATES: dict[str, tuple[Measured, bool]] = {
    "in tolerance": (carried(mse=1.01e-4), True),
    "worse": (carried(mse=2e-4), False),
    "improved": (carried(mse=5e-5), True),
    "missing": (carried(accepted=None), False),
    "absolute": (carried(mse=2e-2), False),
    "absolute, missing": (carried(mse=2e-2, accepted=None), False),
    "nan": (carried(mse=math.nan), False),
    "inf": (carried(mse=math.inf), False),
    "not computed": (carried(mse=None), False),
    "nan, missing": (carried(mse=math.nan, accepted=None), False),
    "elements": (carried(nonfinite=1), False),
    "elements, missing": (carried(nonfinite=1, accepted=None), False),
    "elements of the reference": (carried(nonfinite_reference=1), False),
    "accepted nan": (carried(accepted={**ACCEPTED, "relative_mse": math.nan}), False),
}  # fmt: skip
SAME = {KEY: 1.01e-4, OTHER: 5e-5}
# state, which → values written, whether the test passes then
TABLE: dict[tuple[str, str], tuple[dict[tuple[str, str, str], float], bool]] = {
    ("in tolerance", "failed"): ({}, True),
    ("in tolerance", "new"): ({}, True),
    ("in tolerance", "all"): (SAME, True),
    ("worse", "failed"): ({KEY: 2e-4}, True),
    ("worse", "new"): ({}, False),
    ("worse", "all"): ({KEY: 2e-4, OTHER: 5e-5}, True),
    ("improved", "failed"): ({KEY: 5e-5}, True),
    ("improved", "new"): ({}, True),
    ("improved", "all"): ({KEY: 5e-5, OTHER: 5e-5}, True),
    ("missing", "failed"): ({KEY: 1e-4, OTHER: 5e-5}, True),
    ("missing", "new"): ({KEY: 1e-4, OTHER: 5e-5}, True),
    ("missing", "all"): ({KEY: 1e-4, OTHER: 5e-5}, True),
    ("accepted nan", "failed"): ({KEY: 1e-4}, True),
    ("accepted nan", "new"): ({}, False),
    ("accepted nan", "all"): ({KEY: 1e-4, OTHER: 5e-5}, True),
    **{
        (state, which): ({}, False)
        for which in WHICH
        for state in STATES
        if state.startswith(("absolute", "nan", "inf", "not computed", "elements"))
    },
}


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("state", STATES)
def test_the_table(state: str, which: Any) -> None:
    site, passes = STATES[state]
    judgement = judged(site)
    assert judgement.passed is passes
    values, passes_updated = TABLE[state, which]
    update = decide_update(judgement, which)
    assert update.values == values
    assert update.passed is passes_updated
    assert {c.key for c in update.remaining} <= {c.key for c in judgement.failed}
    accepted = {**(site.accepted or {}), **{key[2]: value for key, value in values.items()}}
    stored = judged(replace(site, accepted=accepted))
    assert stored.passed is passes_updated, "what an update says passes does pass once stored"


@pytest.mark.parametrize("which", WHICH)
def test_a_site_that_is_gone(which: Any) -> None:
    update = decide_update(judged(carried(), absent={("gone", "carried"): ""}), which)
    assert update.removed == (() if which == "new" else (("gone", "carried"),))
    assert [c.kind for c in update.remaining] == (["absent"] if which == "new" else [])


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize(
    "accepted", [ACCEPTED, None, {"relative_mse": 1.0, "one_minus_correlation": 1.0}]
)
def test_the_format_budget_cannot_be_accepted(accepted: Any, which: Any) -> None:
    judgement = judged(measured(mse=1e-3, accepted=accepted))
    update = decide_update(judgement, which)
    assert update.values == {}
    assert "budget" in [c.kind for c in update.remaining]
    assert "raise budget_db (default)" in update.hint
    assert "cannot accept" in update.hint


@pytest.mark.parametrize("which", WHICH)
def test_a_broken_site_is_left_alone_and_the_others_are_not(which: Any) -> None:
    sites = [
        carried("bad", mse=2e-2, accepted=None),
        carried("new", accepted=None),
        measured("bad"),
    ]
    update = decide_update(judged(*sites), which)
    written = {(site, scope) for site, scope, _ in update.values}
    assert written == (
        {("new", "carried"), ("bad", "local")} if which == "all" else {("new", "carried")}
    )
    assert {c.site for c in update.remaining} == {"bad"}
    assert "change the limit (rule 1)" in update.hint


def test_nothing_to_compare_cannot_be_accepted() -> None:
    update = decide_update(judged(measured(gated=(), accepted=None, ideal=None)))
    assert (update.values, update.passed) == ({}, False)
    assert "cannot accept" in update.hint


def test_changes_say_old_and_new() -> None:
    sites = [carried("a", 2e-4), carried("b", 5e-5), carried("c", accepted=None), carried("d")]
    judgement = judged(*sites, absent={("gone", "carried"): ""})
    lines = [(c.site, c.metric, c.state, c.old, c.new) for c in decide_update(judgement).changes]
    assert lines == [
        ("a", "relative_mse", "worse", 1e-4, 2e-4),
        ("b", "relative_mse", "improved", 1e-4, 5e-5),
        ("c", "one_minus_correlation", "new", None, 5e-5),
        ("c", "relative_mse", "new", None, 1e-4),
        ("gone", "", "removed", None, None),
    ]
    assert {c.state for c in decide_update(judgement, "all").changes if c.site == "d"} == {"same"}
    local = decide_update(judged(measured(ideal={"relative_mse": 1e-4})), "all").changes
    assert [(c.metric, c.old) for c in local] == [
        ("one_minus_correlation", 5e-5),
        ("relative_mse", 1e-4),
    ]


def test_parts_are_recorded_with_a_new_site_and_with_all() -> None:
    part = {"parts": {"worst_channel": {"relative_mse": 0.5, "one_minus_correlation": math.nan}}}
    key = ("layers.0:output", "carried", "relative_mse@worst_channel")
    new, old = carried(accepted=None, **part), carried(**part)
    assert decide_update(judged(new)).values == {KEY: 1e-4, OTHER: 5e-5, key: 0.5}
    assert decide_update(judged(new), "new").values[key] == 0.5
    for which in WHICH:
        assert decide_update(judged(old), which).values[key] == 0.5, "its line was removed"
    assert decide_update(judged(old)).values == {key: 0.5}
    assert decide_update(judged(old), "all").values[key] == 0.5
    assert decide_update(judged(carried(mse=1.0, accepted=None, **part))).values == {}


def test_an_unknown_choice() -> None:
    with pytest.raises(QgateError, match=r"'faild'.*Did you mean failed"):
        decide_update(judged(carried()), "faild")  # type: ignore[arg-type]
