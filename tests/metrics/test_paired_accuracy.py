"""Paired accuracies against scipy, simulated models, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from qgate.errors import QgateError
from qgate.metrics.paired_accuracy import compare_accuracy, sign_test, wilson_interval
from tests.shares import proof


@pytest.mark.parametrize(
    ("lost", "gained"), [(0, 0), (1, 0), (5, 5), (3, 14), (40, 20), (700, 640)]
)
def test_the_sign_test_is_that_of_scipy(lost: int, gained: int) -> None:
    expected = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    assert sign_test(lost, gained) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (7, 7), (1, 2), (431, 1000)])
def test_the_interval_is_that_of_scipy(successes: int, trials: int) -> None:
    expected = binomtest(successes, trials).proportion_ci(method="wilson")
    assert wilson_interval(successes, trials) == pytest.approx(tuple(expected), abs=1e-6)


def _answers(seed: int, questions: int, worse_by: float) -> tuple[list[bool], list[bool]]:
    """Draw answers of a reference and of a model that differs in 4 % of them, and is worse."""
    draw = np.random.default_rng(seed)
    reference = draw.random(questions) < 0.7
    chance = np.where(reference, (0.04 + worse_by) / 2 / 0.7, (0.04 - worse_by) / 2 / 0.3)
    return (reference ^ (draw.random(questions) < chance)).tolist(), reference.tolist()


@proof
def test_a_worse_model_is_found_as_often_as_said() -> None:
    needed = compare_accuracy(*_answers(0, 200_000, 0.01)).needed
    assert needed == pytest.approx(3235, rel=0.03)
    verdicts = [compare_accuracy(*_answers(seed, needed, 0.01)).verdict for seed in range(200)]
    assert 0.72 < verdicts.count("worse") / 200 < 0.88
    assert "better" not in verdicts


def test_equal_models_differ_in_one_of_twenty_runs_at_most() -> None:
    verdicts = [compare_accuracy(*_answers(seed, 500, 0.0)).verdict for seed in range(200)]
    assert verdicts.count("inconclusive") >= 0.95 * 200
    assert "same" not in verdicts


def test_few_questions_are_inconclusive_and_many_are_not() -> None:
    few = compare_accuracy([True, True, False], [True, False, True])
    assert few.verdict == "inconclusive"
    assert str(few) == (
        "inconclusive: 66.7% (20.8% to 93.9%) right, the reference 66.7% (20.8% to 93.9%); of 3 "
        "questions 1 lost and 1 gained, chance 1; 52,424 questions would show a difference of "
        "1.0%"
    )
    assert compare_accuracy([True] * 900, [True] * 900).verdict == "same"
    worse = compare_accuracy([False] * 20 + [True] * 80, [True] * 100)
    assert (worse.verdict, worse.difference) == ("worse", -0.2)
    assert str(worse).startswith("worse: 80.0% (71.1% to 86.7%) right, the reference 100.0% (")


@pytest.mark.parametrize(
    ("right", "reference", "least", "words"),
    [
        ([], [], 0.01, "0 and 0 answers are no pairs"),
        ([True], [True, False], 0.01, "1 and 2 answers are no pairs"),
        ([0.5], [1], 0.01, "0.5 is no truth value"),
        ([1], [1], 0.0, "least=0.0 is no difference"),
    ],
)
def test_what_are_no_pairs_is_refused(
    right: list[bool], reference: list[bool], least: float, words: str
) -> None:
    with pytest.raises(QgateError, match=words):
        compare_accuracy(right, reference, least)
