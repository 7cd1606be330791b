"""Accuracy of two models on the same questions: a paired exact test, and how many it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qgate.errors import QgateError

_Z95, _Z80 = 1.959964, 0.841621
"""Normal quantiles: two-sided 95 %, and one-sided 80 % for the power of a test."""
_SIGNIFICANT = 0.05


@dataclass(frozen=True)
class PairedAccuracy:
    """Two models on the same questions.

    lost, gained  questions that only the reference, or only the actual model, answers right
    chance        of so uneven a split of these, if both models were equally good: McNemar's exact
                  two-sided test, which is the sign test of the pairs
    needed        questions that show a difference of `least` in 80 % of runs, at this disagreement
    """

    questions: int
    right: int
    reference_right: int
    lost: int
    gained: int
    least: float
    chance: float
    needed: int

    @property
    def difference(self) -> float:
        """Return the accuracy less the reference's."""
        return (self.gained - self.lost) / self.questions

    @property
    def verdict(self) -> str:
        """Return worse, better, same, or inconclusive where there are too few questions."""
        if self.chance <= _SIGNIFICANT:
            return "worse" if self.lost > self.gained else "better"
        return "same" if self.questions >= self.needed else "inconclusive"

    def __str__(self) -> str:
        shares = []
        for right in (self.right, self.reference_right):
            low, high = wilson_interval(right, self.questions)
            shares.append(f"{right / self.questions:.1%} ({low:.1%} to {high:.1%})")
        text = (
            f"{self.verdict}: {shares[0]} right, the reference {shares[1]}; of {self.questions:,} "
            f"questions {self.lost:,} lost and {self.gained:,} gained, chance {self.chance:.2g}"
        )
        if self.verdict == "inconclusive":
            text += f"; {self.needed:,} questions would show a difference of {self.least:.1%}"
        return text


def compare_accuracy(
    right: Sequence[bool], reference_right: Sequence[bool], least: float = 0.01
) -> PairedAccuracy:
    """Compare which questions two models answer right.

    right, reference_right  one truth value per question, in the same order
    least                   smallest difference of the accuracy that matters
    """
    if len(right) != len(reference_right) or not right:
        raise QgateError(
            f"{len(right)} and {len(reference_right)} answers are no pairs: give one truth value "
            "per question of both models, in the same order."
        )
    if odd := {value for value in (*right, *reference_right) if value not in (0, 1)}:
        raise QgateError(f"{min(odd)!r} is no truth value: an answer is right, 1, or wrong, 0.")
    if not 0 < least < 1:
        raise QgateError(f"least={least} is no difference of accuracies: it is between 0 and 1.")
    pairs = list(zip(map(bool, right), map(bool, reference_right), strict=True))
    lost, gained = pairs.count((False, True)), pairs.count((True, False))
    return PairedAccuracy(
        len(pairs), sum(a for a, _ in pairs), sum(r for _, r in pairs), lost, gained, least,
        sign_test(lost, gained), _needed((lost + gained) / len(pairs), least),
    )  # fmt: skip


def sign_test(first: int, second: int) -> float:
    """Return the chance of a split at least as uneven, if both sides were equally likely."""
    total, few = first + second, min(first, second)
    tail = sum(math.comb(total, number) for number in range(few + 1))
    return min(1.0, float(tail * 2 / 2**total))


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    share, spread = successes / trials, _Z95**2 / trials
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def _needed(disagreement: float, least: float) -> int:
    """Return how many pairs McNemar's test takes, if so many of them disagree."""
    share = max(disagreement, least)
    root = _Z95 * math.sqrt(share) + _Z80 * math.sqrt(share - least**2)
    # Counts are whole: an exact test takes so many more.
    return math.ceil((root / least) ** 2 + 1 / least)
