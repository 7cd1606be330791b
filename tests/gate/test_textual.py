"""What quantizes a site is a text, compared as one."""

from __future__ import annotations

import pytest

from qgate.gate import WHICH, Limits, Verdict, decide_update, failure_text, first_line, judge
from tests.gate.making import measured, verdict

NOW, THEN = "mxfp4_e2m1 per 32, floor", "mxfp8_e4m3 per 32, floor"
KEY = ("layers.0:input", "local", "quantizer")


def sites(*quantizers: tuple[str, str], mse: float = 1e-4) -> Verdict:
    """Judge sites that are quantized by other words than accepted."""
    rows = [
        measured(
            f"layers.{number}:input", mse, order=number, ideal=None,
            accepted={"relative_mse": 1e-4}, gated=("relative_mse", "quantizer"),
            values={"relative_mse": mse}, texts={"quantizer": now},
            accepted_texts={"quantizer": accepted} if accepted else {},
        )
        for number, (accepted, now) in enumerate(quantizers)
    ]  # fmt: skip
    return verdict(*rows)


def test_the_same_text_passes_and_is_no_improvement() -> None:
    assert sites((NOW, NOW)).passed
    assert sites((NOW, NOW)).improved == ()


@pytest.mark.parametrize("now", [THEN, "nothing", NOW + " ", NOW.upper()])
def test_another_text_fails_and_both_are_told(now: str) -> None:
    judgement = sites((NOW, now))
    assert [check.metric for check in judgement.failed] == ["quantizer"]
    assert (
        first_line(judgement, "2-4") == f"{NOW} accepted, {now} found, at layers.0:input (mode 2-4)"
    )
    text = failure_text(judgement, "2-4")
    assert text.count(NOW + " accepted") == 1
    assert "quantizer" not in text, "no table of texts"
    assert "an update without --accept-plan writes nothing of this gate" in text


def test_a_plan_is_one_sentence_for_all_sites() -> None:
    text = failure_text(sites(*[(NOW, THEN)] * 70), "2-4")
    assert text.splitlines()[0] == f"{NOW} accepted, {THEN} found, at all 70 sites (mode 2-4)"
    assert text.count(NOW) == 1
    some = failure_text(sites((NOW, NOW), *[(NOW, THEN)] * 2, (THEN, "nothing")), "2-4")
    assert some.splitlines()[:2] == [
        f"{NOW} accepted, {THEN} found, at 2 of 4 sites, first layers.1:input (mode 2-4) (+1 more failed check)",
        f"  {THEN} accepted, nothing found, at layers.3:input",
    ]


def test_numbers_beside_a_plan_keep_their_table() -> None:
    lines = failure_text(sites(*[(NOW, THEN)] * 2, mse=1.0), "2-4").splitlines()
    assert (
        lines[0]
        == f"{NOW} accepted, {THEN} found, at all 2 sites (mode 2-4) (+2 more failed checks)"
    )
    assert sum(" relative_mse " in line for line in lines) == 2
    assert sum(NOW in line for line in lines) == 1


def test_nothing_of_a_gate_with_another_plan_is_written() -> None:
    verdict = sites((NOW, THEN), (NOW, NOW), mse=1.0)
    assert decide_update(verdict).values == {}
    assert len(decide_update(verdict).remaining) == 3
    assert len(decide_update(verdict, accept_plan=True).values) == 3


def test_a_quantized_site_that_is_gone_is_another_plan() -> None:
    gone = ("layers.9:weight", "local")
    judgement = judge(sites((NOW, NOW)).measured, lambda _: Limits(), True, absent={gone: THEN})
    first = failure_text(judgement, "2-4").splitlines()[0]
    assert first == f"{THEN} accepted, no such site found, at layers.9:weight (mode 2-4)"
    assert decide_update(judgement).removed == ()
    assert not decide_update(judgement).passed
    assert decide_update(judgement, accept_plan=True).removed == (gone,)
    assert decide_update(judgement, accept_plan=True).passed


def test_an_update_stores_the_text() -> None:
    for which in WHICH:
        refused = decide_update(sites((THEN, NOW)), which)
        assert (refused.values, refused.changes, refused.removed) == ({}, (), ())
        assert [check.metric for check in refused.remaining] == ["quantizer"]
    update = decide_update(sites((THEN, NOW)), accept_plan=True)
    assert update.values == {KEY: NOW}
    assert update.passed
    assert [(change.old, change.new) for change in update.changes] == [(THEN, NOW)]
    assert decide_update(sites(("", NOW))).values == {}, "nothing was quantized there"
    assert decide_update(sites(("", NOW)), accept_plan=True).values == {KEY: NOW}


def test_without_an_accepted_text_it_is_missing() -> None:
    (check,) = sites(("", NOW)).failed
    assert (check.kind, check.text) == ("missing", NOW)
