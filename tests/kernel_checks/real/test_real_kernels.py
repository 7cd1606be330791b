"""A share of the real kernels is checked anew; docs/real-kernels.md says what it must give.

All of them: python -m tests.kernel_checks.real
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from qgate.testing import CheckFailure
from tests.kernel_checks.real.collection import ROOMS, Room
from tests.kernel_checks.real.page import PAGE, make_page, rows, word_of
from tests.kernel_checks.real.random_kernels import random_fault
from tests.kernel_checks.real.verdicts import Selection, Verdict, is_named, judge_room, titles_of
from tests.shares import every_case, share

pytest.importorskip("triton", reason="there is no triton for this platform")


@pytest.fixture(scope="module")
def stored() -> dict[str, str]:
    return rows(PAGE.read_text(encoding="utf-8"))


RED = {"named": "red"}


@share(16)
@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.module)
def test_the_page_says_what_a_run_says(
    room: Room, stored: dict[str, str], request: pytest.FixtureRequest
) -> None:
    titles = titles_of(room)
    assert set(titles) <= set(stored), "run `python -m tests.kernel_checks.real --write`"
    if not every_case(request.config):
        draw = random.Random(f"{request.config.option.case_seed} {room.module}")
        titles = draw.sample(titles, min(room.sample, len(titles)))
    if not titles:
        return
    verdicts = list(judge_room(room, Selection(titles=tuple(titles))))
    assert len(verdicts) == len(titles)
    for verdict in verdicts:
        word = "bug" if verdict.is_bug and verdict.verdict == "red" else word_of(verdict)
        # What a first line names depends on the processor, whose sums are others.
        assert RED.get(word, word) == RED.get(stored[verdict.title], stored[verdict.title]), verdict


@share(80)
@pytest.mark.parametrize("seed", range(200))
def test_a_random_right_kernel_is_green_and_its_fault_is_red(seed: int) -> None:
    kernel, fault = random_fault(seed)
    kernel.check()
    with pytest.raises(CheckFailure):
        kernel.check(fault)


def test_there_are_enough_kernels_and_faults(stored: dict[str, str]) -> None:
    words = list(stored.values())
    assert words.count("green") >= 60
    assert words.count("red") + words.count("named") >= 100
    assert words.count("bug") >= 3


# The page ----------------------------------------------------------------------------------------

GREEN = Verdict("torch", "linear", "", False, "green", "", False, False, 1.0)


def test_advice_to_declare_other_sums_names_no_fault() -> None:
    assert is_named("bias", "kernel is wrong: a bias is dropped")
    assert not is_named("rounding", "kernel is wrong: errors look like rounding: sums in bfloat16")


def test_a_page_shows_what_is_not_as_wanted() -> None:
    red = replace(GREEN, kernel="conv", verdict="red", first_line="kernel is wrong: a|b")
    missed = replace(GREEN, fault="bias left out", has_words=True)
    named = replace(red, fault="row lost", named=True, has_words=True)
    died = replace(GREEN, kernel="mlp", verdict="none", first_line="the process ended")
    bug = replace(red, kernel="cast", fault="cuts off", is_bug=True)
    page = make_page([GREEN, red, missed, named, died, bug])
    assert "**1 of 3 right kernels are green, 1 of 2 planted faults are red.**" in page
    assert rows(page) == {
        "torch: cast": "bug",
        "torch: linear": "green",
        "torch: conv": "red",
        "torch: mlp": "no verdict",
        "torch: linear: bias left out": "green",
        "torch: conv: row lost": "named",
    }
    assert "Faults that are not red: 1.\n\n- torch: linear: bias left out: green" in page
    assert "| torch | conv | **red** | `a\\|b` |" in page
