"""What quantizes a site is a text, compared as one."""

from __future__ import annotations

import pytest

from qgate.gate import Limits, Measured, Verdict, decide_update, failure_text, first_line, judge

NOW, THEN = "mxfp4_e2m1 per 32, floor", "mxfp8_e4m3 per 32, floor"
KEY = ("x:input", "local", "quantizer")


def verdict(now: str, accepted: str) -> Verdict:
    row = Measured(
        site="x:input", layer="x", scope="local", order=0, nonfinite=0,
        values={"relative_mse": 1e-4}, accepted={"relative_mse": 1e-4},
        texts={"quantizer": now}, accepted_texts={"quantizer": accepted} if accepted else {},
        gated=("relative_mse", "quantizer"),
    )  # fmt: skip
    return judge([row], lambda _: Limits(), True)


def test_the_same_text_passes_and_is_no_improvement() -> None:
    assert verdict(NOW, NOW).passed
    assert verdict(NOW, NOW).improved == ()


@pytest.mark.parametrize("now", [THEN, "nothing", NOW + " ", NOW.upper()])
def test_another_text_fails_and_both_are_told(now: str) -> None:
    found = verdict(now, NOW)
    assert [check.metric for check in found.failed] == ["quantizer"]
    assert first_line(found, "2-4") == (
        f"quantizer {now!r} instead of {NOW!r} at x:input (mode 2-4)"
    )
    assert NOW in failure_text(found, "2-4").splitlines()[3]


def test_an_update_stores_the_text() -> None:
    update = decide_update(verdict(NOW, THEN))
    assert update.values == {KEY: NOW}
    assert update.passed
    assert [(each.old, each.new) for each in update.changes] == [(THEN, NOW)]
    assert decide_update(verdict(NOW, "")).values == {KEY: NOW}


def test_without_an_accepted_text_it_is_missing() -> None:
    (check,) = verdict(NOW, "").failed
    assert (check.kind, check.text) == ("missing", NOW)
