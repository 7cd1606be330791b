"""Which conventions and which arithmetic explain the results of a kernel at all its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qgate.expected.conventions import NUDGE
from qgate.expected.distances import distance_to_multiple
from qgate.expected.noise import ARITHMETICS, MARGIN, RUNS, Expected, evaluate, moved
from qgate.expected.operators import evaluate_changed
from qgate.kernel_checks.arithmetic import Accounted, account
from qgate.kernel_checks.fits import Case
from qgate.kernel_checks.requests import KernelRequest
from qgate.kernel_checks.runs import Failing, KernelRun
from qgate.kernel_checks.subject import RESULT, Choices, KernelSubject

MOST_NEAREST, MOST_COMPARED = 5, 24
"""Conventions that are tried beside the definition, and those that they are chosen from."""
ALIKE = 1.1
"""Times the least distance up to which conventions are as near as the nearest."""
INEXACT = 0.01
"""Share of wrong values up to which the reference in float32 is asked if it is exact there."""
FLOAT32 = "float32"
RATIOS = "ratios in float32"
"""How the name of that convention ends which most kernels follow."""
MOST_STAGED = 2
"""Conventions for which all codes inside that float noise decides are taken to be free."""
MOST_ACCOUNTED = 2
"""Conventions beside the definition for which an arithmetic is looked for, the nearest ones."""


@dataclass(frozen=True)
class Judgement:
    """The conventions and the arithmetic that explain the results of a kernel, if any do.

    ties       True if codes within float noise of a rounding boundary may be either
    failing    inputs that nothing explains, beside what comes nearest
    accounted  the arithmetic, where it is not exact sums rounded once
    nearly     conventions and an arithmetic that explain some of what is failing, if any do
    """

    subject: KernelSubject
    choices: Choices
    ties: bool
    failing: list[Failing]
    accounted: Accounted | None = None
    nearly: tuple[Choices, Accounted] | None = None

    def expected(self, run: KernelRun) -> Expected:
        """Return the bounds that a run was held at."""
        expected = self.subject.expected(run.arguments, self.choices, ties=self.ties)
        return self.accounted.expected(run, expected) if self.accounted else expected

    def explains(self, run: KernelRun) -> bool:
        """Tell if a further result of an input that was judged is explained as the first one is."""
        fit = self.accounted.fits.get(run.name) if self.accounted else None
        if fit is not None:
            return fit.of(Case.of(self.subject, self.choices, run)).is_right
        return self.expected(run).explains(run.actual)


def judge(subject: KernelSubject, runs: Sequence[KernelRun], request: KernelRequest) -> Judgement:
    """Find conventions and an arithmetic that explain all runs.

    Exact sums come first, rounded once; then known arithmetics; and only then codes that float
    noise decides, since they are the only ones of these that are no definite values.
    """
    definition: Choices = dict.fromkeys(subject.slots, 0)
    listed = [definition]
    nearly: list[tuple[Choices, Accounted]] = []
    for number, choices in enumerate(listed):
        # Code that quantizes inside is slow: of other conventions one input tells most.
        one = number > MOST_ACCOUNTED or (number > 0 and bool(subject.stages))
        failing = list(_failing(subject, runs, choices, ties=False, stop=one))
        accounted = None
        if (failing or request.asks) and number <= MOST_ACCOUNTED:
            some: list[Accounted] = []
            accounted = account(subject, runs, choices, failing, request, some)
            if accounted and one:
                failing = list(_failing(subject, runs, choices, ties=False))
                accounted = account(subject, runs, choices, failing, request, some)
            nearly += [(choices, each) for each in some]
        if (not failing and not request.asks) or accounted:
            return Judgement(subject, choices, False, [], accounted)
        if choices is definition and failing:
            nearest = _nearest(subject, failing[0], definition)
            usual = [] if not subject.stages else _usual(subject)
            listed += usual + [c for c in nearest if c is not definition and c not in usual]
        if number == 0:
            first = failing
    if request.asks:
        return Judgement(subject, definition, False, first)
    judgement = _with_ties(subject, runs, nearest, first)
    best = max(nearly, key=lambda entry: len(entry[1].fits), default=None)
    return replace(judgement, nearly=best)


def _with_ties(
    subject: KernelSubject,
    runs: Sequence[KernelRun],
    listed: Sequence[Choices],
    first: list[Failing],
) -> Judgement:
    """Take codes at boundaries to be free; `first` fails under the first conventions otherwise."""
    best: tuple[Choices, list[Failing]] | None = None
    if subject.stages:  # whose codes were settled one by one before, and cost much all together
        of_first = [run for run in runs if run.name == first[0].name]
        sides = (_failing(subject, of_first, c, ties=True) for c in listed[:MOST_STAGED])
        listed = [c for c, side in zip(listed, sides, strict=False) if next(side, None) is None]
        if not listed:
            return Judgement(subject, first[0].choices, False, first)
    for number, choices in enumerate(listed):
        if best is not None and number > 1:
            still = next(run for run in runs if run.name == best[1][0].name)
            if next(_failing(subject, [still], choices, ties=True), None) is not None:
                continue
        failing = list(_failing(subject, runs, choices, ties=True))
        if best is None or len(failing) < len(best[1]):
            best = choices, failing
        if not failing:
            break
    assert best is not None
    return Judgement(subject, best[0], True, best[1])


def _usual(subject: KernelSubject) -> list[Choices]:
    """List the convention of most kernels: ratios to scales in float32.

    Where values are rounded before they are quantized inside, that hides which one is near.
    """
    usual = {
        slot: 1 if len(q.choices) > 1 and q.choices[1].name.endswith(RATIOS) else 0
        for slot, q in subject.slots.items()
    }
    return [usual] if any(usual.values()) else []


def _nearest(subject: KernelSubject, failing: Failing, start: Choices) -> list[Choices]:
    """List conventions by the distance of their expected values from an actual result.

    Where they begin is among them: before all others, unless one is clearly nearer.
    """
    if all(len(quantization.choices) == 1 for quantization in subject.slots.values()):
        return [start]

    def distance_of(choices: Choices) -> float:
        values = subject.values(failing.arguments, choices)
        return distance_to_multiple(failing.actual, values)

    current, nearest = start, distance_of(start)
    distances = [(nearest, start)]
    for _ in range(2):
        before = nearest
        for changed in neighbors(subject, current):
            if any(changed == listed for _, listed in distances):
                continue
            distance = distance_of(changed)
            distances.append((distance, changed))
            if distance < nearest:
                current, nearest = changed, distance
        if nearest == before:
            break
    distances[0] = (distances[0][0] / 2, start)
    # Roundings of a result in 16 bits decide between those that are as near: plainer ones go first.
    least = ALIKE * min(distance for distance, _ in distances)
    distances.sort(key=lambda entry: (max(entry[0], least), sum(entry[1].values())))
    slots = subject.slots
    listed: list[Choices] = []
    alike: list[Choices] = []
    for _, choices in distances[:MOST_COMPARED]:
        is_last_bit = any(slots[slot].choices[choices[slot]].is_last_bit for slot in slots)
        representatives = [start, *listed] if is_last_bit else []
        same = any(_are_alike(subject, failing, choices, other) for other in representatives)
        (alike if same else listed).append(choices)
    # Of those that differ in the last bit of a scale, one stands for all.
    ordered = (listed + alike)[: MOST_NEAREST + 1]
    return ordered if any(choices is start for choices in ordered) else [*ordered, start]


def _are_alike(subject: KernelSubject, failing: Failing, left: Choices, right: Choices) -> bool:
    """Tell if two conventions give the same codes, and scales but for float noise."""
    if left.get(RESULT) != right.get(RESULT):
        return False
    sides = (subject.ideal(failing.arguments, choices) for choices in (left, right))
    pairs = [pair for pair in zip(*sides, strict=True) if isinstance(pair[0], Tensor)]
    return all(
        torch.allclose(a, b, rtol=NUDGE, atol=0.0, equal_nan=True)
        for a, b in pairs
        if a.is_floating_point()
    )


def neighbors(subject: KernelSubject, current: Choices) -> Iterator[Choices]:
    """Change one convention, or that of all arguments in one format together."""
    slots = subject.slots
    names = dict.fromkeys(quantization.name for quantization in slots.values())
    groups = [[slot for slot in slots if slots[slot].name == name] for name in names]
    groups += [[slot] for group in groups if len(group) > 1 for slot in group]
    for group in groups:
        for number in range(min(len(slots[slot].choices) for slot in group)):
            changed = {**current, **dict.fromkeys(group, number)}
            if changed != current:
                yield changed


def _failing(
    subject: KernelSubject,
    runs: Sequence[KernelRun],
    choices: Choices,
    *,
    ties: bool,
    stop: bool = False,
) -> Iterator[Failing]:
    """List the runs that conventions do not explain; with `stop` the first one alone."""
    for run in runs:
        expected = subject.expected(run.arguments, choices, ties=ties)
        wrong = expected.outside(run.actual)
        if 0 < int(wrong.sum()) <= max(1, INEXACT * wrong.numel()):
            wrong &= ~_inexact(subject, run, choices, expected)
        if bool(wrong.any()):
            about = run.name, run.arguments, run.actual
            yield Failing(subject, choices, *about, expected, wrong, run.source)
            if stop:
                return


def _inexact(
    subject: KernelSubject, run: KernelRun, choices: Choices, expected: Expected
) -> Tensor:
    """Return where large terms cancel, so that right code in float32 lies outside of the bounds.

    The reference does, too, or roundings of what its operators give explain the value: sums whose
    terms have one sign are less exact than their arguments.
    """
    if subject.output:
        return torch.zeros_like(run.actual, dtype=torch.bool)
    like, ideal = subject.like, subject.ideal(run.arguments, choices)
    bounds = subject.before_output(run.arguments, choices, FLOAT32)
    outside = bounds.outside(evaluate(like, ideal, torch.float32))
    if subject.stages or subject.arithmetic != FLOAT32:
        return outside
    generator = torch.Generator().manual_seed(0)
    squares = torch.zeros_like(expected.values)
    for _ in range(RUNS):
        near = evaluate_changed(
            like, ideal, lambda value, _site, _name: moved(value, ARITHMETICS[FLOAT32], generator)
        )
        squares += (near - expected.values).nan_to_num_(0.0, 0.0, 0.0).square_()
    room = expected.width + MARGIN * (squares / RUNS).sqrt_()
    return outside | ~Expected.around(expected.values, room).outside(run.actual)
