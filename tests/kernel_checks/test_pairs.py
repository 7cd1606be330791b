"""Pairs of a right and a wrong kernel: the right one is green, the wrong one red by its name."""

from __future__ import annotations

import re

import pytest

from qgate.testing import CheckFailure
from tests.kernel_checks import (
    wrong_attention,
    wrong_codes,
    wrong_further,
    wrong_gradients,
    wrong_layouts,
    wrong_operators,
    wrong_recurrences,
    wrong_tiles,
)
from tests.kernel_checks.pairs import Pair
from tests.kernel_checks.right_pairs import KERNELS, sites_of
from tests.shares import always, share, slow_file

pytestmark = slow_file

MODULES = (
    wrong_tiles, wrong_codes, wrong_operators, wrong_attention, wrong_recurrences, wrong_gradients,
    wrong_further, wrong_layouts,
)  # fmt: skip
PAIRS = [pair for module in MODULES for pair in module.PAIRS]
UNNAMED = frozenset({
    "groups of another size", "weight before the activation", "error before the gate",
    "state with a stale scale", "state by columns", "scale of the gate",
    "gradient of the gain by the source",
})  # fmt: skip
"""Faults that are red and whose first line says where they are, but not what they are."""
NAMED = [pair for pair in PAIRS if pair.name not in UNNAMED]


@share(80)
@pytest.mark.parametrize("pair", NAMED, ids=lambda pair: pair.name)
def test_a_wrong_kernel_is_named_beside_a_right_one(pair: Pair) -> None:
    pair.check(pair.right)
    with pytest.raises(CheckFailure) as failure:
        pair.check(pair.wrong)
    first_line = failure.value.cause
    assert re.search(pair.words, first_line), first_line
    planted = "bfloat16" in pair.words
    assert planted or "sums in" not in first_line, first_line


@share(12)
@pytest.mark.parametrize("name", sorted(UNNAMED))
def test_a_fault_without_a_name_is_red(name: str) -> None:
    (pair,) = (pair for pair in PAIRS if pair.name == name)
    pair.check(pair.right)
    with pytest.raises(CheckFailure, match="is wrong") as failure:
        pair.check(pair.wrong)
    # A state that is quantized by columns looks like coarse sums, which is said with its cost.
    assert name == "state by columns" or "sums in" not in failure.value.cause


# All: python -m tests.kernel_checks.right_pairs
@share(24)
@pytest.mark.parametrize("number", range(0, KERNELS, 7))
def test_a_right_kernel_with_other_values_is_green(number: int) -> None:
    words, site_count = sites_of(number, seed=number)
    assert site_count, words


@always
@pytest.mark.parametrize(("number", "seed"), [(110, 18), (111, 0)])
def test_sums_whose_terms_have_one_sign_may_be_less_exact(number: int, seed: int) -> None:
    words, site_count = sites_of(number, seed=seed)
    assert site_count, words


def test_names_and_kinds_of_faults_are_many() -> None:
    names = [pair.name for pair in PAIRS]
    assert len(set(names)) == len(names) >= 180
    assert len(UNNAMED) <= 0.05 * len(names)
