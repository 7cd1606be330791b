"""A share of the real kernels is checked anew; verdicts.jsonl says what it must give.

All of them: python -m tests.kernel_checks.real
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from qgate.testing import CheckFailure
from tests.kernel_checks.real.collection import ROOMS, Room
from tests.kernel_checks.real.page import (
    PAGE,
    VERDICTS,
    make_page,
    read_verdicts,
    write_verdicts,
)
from tests.kernel_checks.real.random_kernels import random_fault
from tests.kernel_checks.real.verdicts import Selection, Verdict, is_named, judge_room, titles_of
from tests.shares import always, every_case, proof, share, slow_file

pytestmark = slow_file

pytest.importorskip("triton", reason="there is no triton for this platform")


@pytest.fixture(scope="module")
def stored() -> dict[str, Verdict]:
    return {verdict.title: verdict for verdict in read_verdicts(VERDICTS)}


@proof
@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.module)
def test_a_run_repeats_the_stored_verdicts(
    room: Room, stored: dict[str, Verdict], request: pytest.FixtureRequest
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
        # What a first line names depends on the processor, whose sums are others.
        assert verdict.verdict == stored[verdict.title].verdict, verdict


@share(80)
@pytest.mark.parametrize("seed", range(200))
def test_a_random_right_kernel_is_green_and_its_fault_is_red(seed: int) -> None:
    kernel, fault = random_fault(seed)
    kernel.check()
    with pytest.raises(CheckFailure):
        kernel.check(fault)


def test_there_are_enough_kernels_and_faults(stored: dict[str, Verdict]) -> None:
    verdicts = list(stored.values())
    assert sum(v.verdict == "green" for v in verdicts) >= 60
    assert sum(v.verdict == "red" and not v.is_bug for v in verdicts) >= 100
    assert sum(v.is_bug for v in verdicts) >= 3


# The page ----------------------------------------------------------------------------------------

GREEN = Verdict("torch", "2.13.0", "linear", "", False, "green", "", False, False, 1.0)


def test_the_page_is_made_from_the_stored_verdicts(stored: dict[str, Verdict]) -> None:
    assert PAGE.read_text(encoding="utf-8") == make_page(list(stored.values()))


def test_advice_to_declare_other_sums_names_no_fault() -> None:
    assert is_named("bias", "kernel is wrong: a bias is dropped")
    assert not is_named("rounding", "kernel is wrong: errors look like rounding: sums in bfloat16")


@always
def test_verdicts_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_verdicts(tmp_path / "none.jsonl") == []
    write_verdicts(tmp_path / "some.jsonl", [GREEN])
    assert read_verdicts(tmp_path / "some.jsonl") == [replace(GREEN, seconds=0.0)]


def test_a_page_shows_what_is_not_as_wanted() -> None:
    red = replace(GREEN, kernel="conv", verdict="red", first_line="kernel is wrong: a|b")
    missed = replace(GREEN, fault="bias left out", has_words=True)
    named = replace(red, fault="row 3 lost", named=True, has_words=True)
    other = replace(red, fault="row 7 lost", has_words=True)
    died = replace(GREEN, kernel="mlp", verdict="none", first_line="the process ended")
    bug = replace(red, kernel="cast", fault="cuts off", is_bug=True)
    page = make_page([GREEN, red, missed, other, named, died, bug])
    assert "**1 of 3 right kernels are green, 2 of 3 planted faults are red**;" in page
    assert "Right kernels that are red: 2.\n\n- torch: conv: `a\\|b`\n" in page
    assert "- torch: mlp: `the process ended`" in page
    assert "Faults that are not red: 1.\n\n- torch: linear: bias left out: green" in page
    assert "| torch 2.13.0 | 1 | linear |" in page
    assert "2 other faults have first lines that five or fewer share." in page
    assert "| `a\\|b` | row … lost | 6 | 3 |" in make_page([red, *[named, other] * 3])
    assert "Faults that are red with another cause: row 7 lost." in page
    assert "1 more kernels are red because they are wrong as published" in page
