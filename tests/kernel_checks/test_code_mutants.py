"""Slips of the hand in plain kernels, drawn anew for each kernel."""

from __future__ import annotations

import pytest

from tests.kernel_checks import plain_kernels
from tests.kernel_checks.code_mutants import NAMES, Mutant, differs, mutants, seen
from tests.shares import share

OF_RUN = 6


@share(10)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(1, 5))
def test_what_changes_a_kernel_is_red(name: str, seed: int) -> None:
    code_mutants = list(mutants(name, OF_RUN, seed))
    assert len(code_mutants) == OF_RUN
    missed = [m.words for m in code_mutants if not seen(name, m.function) and differs(name, m)]
    assert missed == []


@pytest.mark.parametrize("name", NAMES)
def test_right_kernels_are_green(name: str) -> None:
    assert seen(name, getattr(plain_kernels, name)) == ""


def test_a_mutant_that_changes_nothing_is_told_from_a_fault() -> None:
    flash = Mutant("other tiles", lambda q, k, v: plain_kernels.flash(q, k, v))
    lost = Mutant("a lost key", lambda q, k, v: plain_kernels.flash(q, k, v.index_fill(2, v.new_zeros(1).long(), 0)))  # fmt: skip
    assert not differs("flash", flash)
    assert differs("flash", lost)
