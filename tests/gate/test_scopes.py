"""A scope and a kind of limit are one literal each: judged, worded, ranked and shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from qgate.errors import QgateError
from qgate.gate import Limits, Policy, Verdict, failure_text, judge
from qgate.gate.ledger import decide_update
from qgate.gate.sessions import record_rows
from qgate.page.runs import representative_error
from qgate.results.checks import binding, view_of, worst_first
from qgate.results.failure_causes import causes_of_mode, suspect_of
from qgate.results.kinds import LIMIT_KINDS, SCOPES, LimitKind, Scope, Tier, scope_of
from tests.gate.making import measured

TOY = Scope(
    name="toy", gated=("relative_mse",), limits={"regression": 0.5}, sources=("long_text",),
    tier=Tier.LOCAL, is_local=True, enters=True, is_steady=True,
    better_words="is another toy than accepted",
)  # fmt: skip


@pytest.fixture
def toy() -> Iterator[Scope]:
    yield SCOPES.add(TOY)
    SCOPES.remove(TOY.name)


def verdict(mse: float, accepted: float | None = 1e-4) -> Verdict:
    """A verdict of one toy site, and of a carried error that follows from it."""
    own = None if accepted is None else {"relative_mse": accepted}
    toy_row = measured("layers.0:toy", mse, scope="toy", ideal=None, accepted=own)
    after = measured("layers.1:output", 1e-2, scope="carried", ideal=None, order=1)
    return judge([toy_row, after], Policy().limits_of("int8"))


def records(judged: Verdict) -> list[dict[str, object]]:
    rows = record_rows("suite", "model", "int8", "", judged, judged.failed)
    return [{**row, "node": f"test[{number}]"} for number, row in enumerate(rows)]


@pytest.mark.usefixtures("toy")
def test_a_scope_is_judged_by_its_own_limits() -> None:
    # Half as much error again passes by the default of this scope, and by no other.
    failed = verdict(1.45e-4).failed
    assert {check.scope for check in failed} == {"carried"}
    assert Policy().limits_for("x", scope="toy").regression == 0.5
    worse = {(check.scope, check.kind) for check in verdict(1.6e-4).failed}
    assert ("toy", "regression") in worse
    new = verdict(1e-4, accepted=None)
    assert {c.kind for c in new.failed if c.scope == "toy"} == {"missing"}
    assert decide_update(new).values["layers.0:toy", "toy", "relative_mse"] == 1e-4


@pytest.mark.usefixtures("toy")
def test_a_scope_is_worded_and_ranked() -> None:
    judged = verdict(1e-5)  # steady: less error is another toy
    assert judged.first_source == "layers.0:toy"
    text = failure_text(judged, "int8")
    assert "the error enters at layers.0:toy, the first whose toy error is out" in text
    rows = records(judged)
    assert rows[0]["finding"]["fault"] == "is another toy than accepted"  # type: ignore[index]
    suspects = [suspect for row in rows if (suspect := suspect_of(row)) is not None]
    assert [suspect.tier for suspect in suspects] == [Tier.LOCAL_ACCEPTED, Tier.CARRIED]
    (cause,) = causes_of_mode(suspects)
    assert cause.place == "layers.0:toy"
    assert cause.followers == 1
    assert representative_error({"toy": 1e-5, "isolated": 1.0}) == ("toy", 1e-5)


@pytest.mark.usefixtures("toy")
def test_rules_know_a_scope_and_its_metrics() -> None:
    policy = Policy().with_marker({"absolute": "error_growth<2"})
    assert "error_growth" in policy.limits_for("x", scope="toy").absolute
    assert Policy().with_marker({"scopes": "toy", "regression": 0.1})


def test_a_scope_that_is_not_there_is_an_error_for_rules_and_plain_in_files() -> None:
    with pytest.raises(QgateError, match=r"unknown scope 'toy'. Did you mean.*|Allowed: backward"):
        Policy().with_marker({"scopes": "toy"})
    with pytest.raises(QgateError, match="unknown scope of a"):
        measured("a", scope="toy")
    assert scope_of("toy") == Scope(name="toy")
    assert "toy" not in SCOPES.entries


def test_a_kind_of_limit_is_one_literal() -> None:
    strict = LimitKind(
        name="strict", has_room=True, why="strict limit{reason}", fault="is not strict",
        advice="be strict ({source})", usual_source="always",
    )  # fmt: skip
    LIMIT_KINDS.add(strict)
    try:
        judged = judge([measured(mse=1e-2)], lambda _: Limits())
        checks = tuple(
            replace(check, kind="strict", reason="") if check.kind == "budget" else check
            for check in judged.checks
            if check.passed or check.kind == "budget"
        )
        judged = Verdict(judged.measured, checks)
        text = failure_text(judged, "int8")
        assert "strict limit" in text
        assert "be strict (" in text
        assert "--update-baselines cannot accept this" in text
        (row,) = records(judged)
        assert row["finding"]["fault"] == "is not strict"  # type: ignore[index]
        deciding = binding(worst_first([row])[0])
        assert deciding is not None
        assert view_of(deciding).distance.endswith("x its limit (strict)")
    finally:
        LIMIT_KINDS.remove("strict")
