"""The conventions and the arithmetic that come nearest to a wrong kernel, before it is explained.

A kernel with a fault follows one convention all the same. Beside another one its fault is hidden by
what distinguishes the two.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from qgate.kernel_checks.fits import ArithmeticFit
from qgate.kernel_checks.fitting import neighbors
from qgate.kernel_checks.nearest import nearest_fits
from qgate.kernel_checks.runs import Failing
from qgate.kernel_checks.subject import Choices

NEARER = 0.95
"""Share of the distance that another convention may leave to be the nearer one."""
OUTLYING = 16.0
"""Times the median squared difference up to which a value counts."""
FEWER = 0.5
"""Share of the wrong values that an arithmetic may leave to be the kernel's."""


def settled(case: Failing) -> Failing:
    """Return a wrong result beside the nearest conventions of its arguments."""
    subject = case.subject
    if all(len(quantization.choices) == 1 for quantization in subject.slots.values()):
        return case

    def distance_of(choices: Choices) -> float:
        return _typical_distance(case.actual, subject.values(case.arguments, choices))

    current, nearest = case.choices, distance_of(case.choices)
    for _ in range(2):
        before = nearest
        for changed in neighbors(subject, current):
            distance = distance_of(changed)
            if distance < NEARER * nearest:
                current, nearest = changed, distance
        if nearest == before:
            break
    if current == case.choices:
        return case
    expected = subject.expected(case.arguments, current)
    wrong = expected.outside(case.actual)
    if not bool(wrong.any()):
        return case
    return Failing(subject, current, case.name, case.arguments, case.actual, expected, wrong)


def _typical_distance(actual: Tensor, ideal: Tensor) -> float:
    """Return the squared distance of typical values, whatever one factor between all of them."""
    values, right = (side.double().nan_to_num(0.0, 0.0, 0.0) for side in (actual, ideal))
    ratios = (values / right)[right != 0]
    factor = float(ratios.median()) if ratios.numel() else 1.0
    squares = (values - factor * right).square()
    return float(squares.clamp_max(OUTLYING * float(squares.median())).sum())


def beside_arithmetic(case: Failing) -> tuple[Failing, list[ArithmeticFit]]:
    """Return a wrong result beside the arithmetic that explains most of it, and the nearest ones.

    Where few values are wrong under an arithmetic, these are the wrong ones.
    """
    fits = nearest_fits(case)
    best, fewest = case, FEWER * float(case.wrong.double().sum())
    for fit in fits:
        if fit.values.shape != case.wrong.shape:
            continue
        wrong = fit.widened.outside(case.actual)
        count = float(wrong.double().sum())
        if 0 < count < fewest:
            best, fewest = replace(case, expected=fit.widened, wrong=wrong), count
    return best, fits
