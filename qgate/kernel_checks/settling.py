"""The conventions and the arithmetic that come nearest to a wrong kernel, before it is explained.

A kernel with a fault follows one convention all the same. Beside another one its fault is hidden by
what distinguishes the two.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qgate.expected.derived import CutAxis, are_independent, find_axes
from qgate.expected.noise import evaluate
from qgate.kernel_checks.fits import ArithmeticFit, Case
from qgate.kernel_checks.fitting import Judgement, neighbors
from qgate.kernel_checks.nearest import nearest_fits
from qgate.kernel_checks.runs import Failing, KernelRun
from qgate.kernel_checks.subject import Choices

PLAIN = 0.25
"""Share of wrong values from which on a derived input is plainly wrong."""
NEARER, ALIKE = 0.5, 0.95
"""Share of the distance that a nearer convention leaves, and one that is as near."""
LARGE, SAMPLE = 2**14, 48
"""Elements of a result above which so many rows and columns of it are explained."""
MOST_ALIKE = 8
"""Conventions as near as the nearest one of which that with the fewest wrong values is taken."""
OUTLYING = 16.0
"""Times the median squared difference up to which a value counts."""
FEWER = 0.5
"""Share of the wrong values that an arithmetic may leave to be the kernel's."""


def unexplained(judgement: Judgement) -> list[Failing]:
    """Return the failing runs that remain beside the arithmetic that explains some of them.

    Where an arithmetic explains the example, the fault is at derived inputs alone.
    """
    if judgement.nearly is None:
        return judgement.failing
    choices, accounted = judgement.nearly
    remaining = []
    for case in judgement.failing:
        run = KernelRun(case.name, case.arguments, case.actual)
        sample = Case.of(judgement.subject, choices, run)
        fit = accounted.fits.get(case.name) or ArithmeticFit(sample, accounted.arithmetic)
        if fit.is_right:
            continue
        wrong = fit.widened.outside(sample.actual)
        if wrong.shape == case.wrong.shape and bool(wrong.any()):
            case = replace(case, choices=choices, expected=fit.widened, wrong=wrong)
        remaining.append(case)
    # A fault of the example, too, is seen at most derived inputs.
    few = 2 * len(remaining) <= len(judgement.failing)
    few &= all(float(case.wrong.double().mean()) > PLAIN for case in remaining)
    return remaining if remaining and few else judgement.failing


def settled(case: Failing) -> Failing:
    """Return a wrong result beside the nearest conventions of its arguments."""
    subject = case.subject
    if all(len(quantization.choices) == 1 for quantization in subject.slots.values()):
        return case
    some = narrowed(case)

    def distance_of(choices: Choices) -> float:
        return _typical_distance(some.actual, subject.values(some.arguments, choices))

    current, nearest = case.choices, distance_of(case.choices)
    alike: list[tuple[float, int, Choices]] = []
    for _ in range(2):
        before = nearest
        for changed in neighbors(subject, current):
            distance = distance_of(changed)
            if distance < NEARER * nearest:
                current, nearest = changed, distance
            alike.append((distance, len(alike), changed))
        if nearest == before:
            break
    near = [entry for entry in alike if ALIKE * entry[0] <= nearest and entry[2] != current]
    current = _of_fewest_wrong(some, [current, *(entry[2] for entry in sorted(near)[:MOST_ALIKE])])
    if current == case.choices:
        return case
    expected = subject.expected(case.arguments, current)
    wrong = expected.outside(case.actual)
    if not bool(wrong.any()):
        return case
    return Failing(subject, current, case.name, case.arguments, case.actual, expected, wrong)


def narrowed(case: Failing) -> Failing:
    """Return some rows and columns of a large result, if they are independent of the others.

    The largest value of each argument and the worst of the result are among them, so that scales
    stay what they are.
    """
    if case.wrong.numel() <= LARGE:
        return case
    subject = case.subject
    for axis in find_axes(subject.like, case.ideal):
        dim = axis.output
        touched = {position for position, _ in axis.dimensions}
        if (
            dim is None
            or axis.length <= SAMPLE
            or not all(isinstance(case.arguments[position], Tensor) for position in touched)
        ):
            continue
        index = _telling_entries(case, axis, dim)
        arguments = axis.take(case.arguments, index)
        ideal, cut = subject.ideal(arguments, case.choices), axis.take(case.ideal, index)
        if not all(torch.equal(ideal[position], cut[position]) for position in subject.inputs):
            continue
        if not are_independent(case.expected.values, evaluate(subject.like, ideal), dim, index):
            continue
        position = index.to(case.actual.device)
        actual, wrong = (t.index_select(dim, position) for t in (case.actual, case.wrong))
        about = subject, case.choices, case.name, arguments
        case = Failing(*about, actual, case.expected.select(dim, index), wrong)
    return case


def _telling_entries(case: Failing, axis: CutAxis, dim: int) -> Tensor:
    """Return entries of an axis in order: those of the largest values, of errors, and others."""
    off = case.residual.abs().movedim(dim, 0).flatten(1).amax(1)
    entries = [int(off.argmax()), *torch.linspace(0, axis.length - 1, SAMPLE).long().tolist()]
    for position, side in axis.dimensions:
        argument = case.arguments[position]
        if argument.is_floating_point() and argument.dim() > 1:
            sizes = argument.double().nan_to_num(0.0, 0.0, 0.0).abs()
            entries.append(int(sizes.movedim(side, 0).flatten(1).amax(1).argmax()))
    return torch.tensor(sorted(set(entries)))


def _of_fewest_wrong(case: Failing, listed: list[Choices]) -> Choices:
    """Return the conventions under which a result in 16 bits has the fewest wrong values."""
    run = KernelRun(case.name, case.arguments, case.actual)
    fits = nearest_fits(replace(case, choices=listed[0])) if len(listed) > 1 else []
    if not fits:
        return listed[0]
    arithmetic = fits[0].arithmetic
    shares = [
        ArithmeticFit(Case.of(case.subject, choices, run), arithmetic).share for choices in listed
    ]
    return listed[shares.index(min(shares))]


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
