"""Operators inside a kernel whose result has a factor, found from how the result moves with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qgate.causes.operator_faults import scaled_operators
from qgate.causes.places import factor_words
from qgate.expected.intermediates import HALVES
from qgate.expected.noise import evaluate
from qgate.kernel_checks.explanations import MOST_WORK, work_of
from qgate.kernel_checks.runs import Failing
from qgate.models.refusals import LENGTH_REFUSALS

SMALL_STEP, PER_STEP = 2.0**-10, 2.0**10
"""Change of a factor from which it is told how a result moves."""
STEPS = 4
"""Steps of Newton's method that a factor takes."""
EXPLAINED, ROUNDINGS = 1e-3, 2.0
"""Share of the energy of a difference that a factor may leave, and roundings of a 16-bit result."""
LEAST = 1e-5
"""Distance from 1 from which a factor is named."""
MOST_FACTOR = 64.0
TINY = torch.finfo(torch.float64).tiny
Function = Callable[..., Any]


def describe_operator_gain(case: Failing) -> str:
    """Name the operator whose result is off by a factor; empty if none explains the difference."""
    subject = case.subject
    if subject.output or not bool(case.actual.isfinite().all()):
        return ""
    actual, values = case.actual.double(), subject.values_of(case.ideal, case.choices)
    before = float((actual - values).square().sum())
    operators = scaled_operators(subject.like, case.ideal)
    if (STEPS + 1) * len(operators) * work_of(case) > MOST_WORK:
        return ""
    whole = float((actual * values).sum()) / max(float(values.square().sum()), TINY)
    allowed = EXPLAINED * before
    if case.actual.dtype in HALVES:
        eps = torch.finfo(case.actual.dtype).eps
        allowed += (ROUNDINGS * eps / 12**0.5) ** 2 * float(values.square().sum())
    if float((actual - whole * values).square().sum()) < allowed:
        return ""  # a factor of the result is no operator's
    best: tuple[float, float, str] | None = None
    for words, scaled in operators:
        try:
            left, factor = _fitted(actual, values, scaled, case.ideal)
        except LENGTH_REFUSALS:
            continue
        if left < allowed < before / 4 and (best is None or left < best[0] / 2):
            best = left, factor, words
    if best is None or abs(best[1] - 1) < LEAST:
        return ""
    left, factor, words = best
    noise = abs(factor - 1) * (left / before) ** 0.5
    it = "they" if words.endswith("are") else "it"
    return f"{words} {factor_words(factor, noise)} times as large as {it} should be"


def _fitted(
    actual: Tensor, values: Tensor, scaled: Callable[[float], Function], ideal: list[Any]
) -> tuple[float, float]:
    """Return the energy that the best factor of an operator leaves of a result, and the factor."""
    factor, result, least = 1.0, values, (float("inf"), 1.0)
    for _ in range(STEPS):
        moved = evaluate(scaled(factor + SMALL_STEP), ideal)
        slope = (moved - result) * PER_STEP
        energy = float(slope.square().sum())
        if not energy > 0 or not bool(torch.isfinite(slope).all()):
            break
        factor += float(((actual - result) * slope).sum()) / energy
        if not abs(factor) < MOST_FACTOR:
            break
        result = evaluate(scaled(factor), ideal)
        left = float((actual - result).square().sum())
        if not left < least[0]:
            break
        least = left, factor
    return least
