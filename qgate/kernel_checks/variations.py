"""Faults that are tried: the reference computed with each, and the one that explains the result.

A kernel in 16 bits rounds on its way, so no fault gives its bits. What a fault leaves unexplained
is compared with what the reference leaves, with what factors leave, and with the roundings of such
kernels; the fault that leaves least is named where that is no more than roundings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from qgate.causes.operator_faults import operator_faults
from qgate.causes.readings import wrong_readings
from qgate.expected.noise import evaluate
from qgate.kernel_checks.closeness import Closeness, energy_left
from qgate.kernel_checks.explanations import faulty_arguments
from qgate.kernel_checks.runs import LENGTH_REFUSALS, Failing
from qgate.kernel_checks.subject import Function

CLOSELY = 6
"""Faults that are looked at under the roundings of kernels: those that leave least."""
ALIKE = 1.05
"""Times the least energy up to which a plainer fault is named."""
MOST_WORK = 2**26
"""Elements of arguments and results that are computed for all faults together."""


@dataclass(frozen=True)
class Variation:
    """A fault in words, and the function and the arguments that have it.

    others        lists arguments with the same fault under other conventions
    is_same_kind  True if those may leave far less
    """

    words: str
    like: Function
    arguments: list[Any]
    others: Callable[[], Iterable[list[Any]]] | None = None
    is_same_kind: bool = False

    def nearest(self, actual: Tensor) -> Variation:
        """Return the fault under the convention that leaves least of a result."""
        listed = [self.arguments, *(self.others() if self.others else ())]
        if len(listed) == 1:
            return self
        energies = [energy_left(actual, _values(self.like, arguments)) for arguments in listed]
        return replace(self, arguments=listed[energies.index(min(energies))])


Entry = tuple[float, int, Variation]
"""What a fault leaves, its number, and the fault."""


def describe_variation(case: Failing) -> str:
    """Name the fault that explains a result, but for roundings; empty if none does."""
    actual = case.actual.double()
    if case.subject.output or not bool(actual.isfinite().any()):
        return ""
    before = energy_left(actual, case.expected.values)
    nearest: list[Entry] = []
    for number, variation in enumerate(_affordable(case)):
        energy = energy_left(actual, _values(variation.like, variation.arguments))
        if energy < before or (variation.is_same_kind and energy < math.inf):
            nearest.append((energy, number, variation))
    nearest.sort(key=lambda entry: entry[:2])
    if not nearest:
        return ""
    plain = Variation("", case.subject.like, case.ideal, lambda: _conventions(case)).nearest(actual)
    reference = Closeness.of(case, plain.like, plain.arguments)
    looked = []
    for _, number, variation in _worth_a_look(nearest):
        closest = variation.nearest(actual)
        fault = Closeness.of(case, closest.like, closest.arguments)
        looked.append((fault, number, closest.words))
    fitting = [entry for entry in looked if reference.is_explained_by(entry[0])]
    least = min((fault.least for fault, _, _ in fitting), default=0.0)
    plainest = [entry[1:] for entry in fitting if entry[0].least <= ALIKE * least]
    return min(plainest)[1] if plainest else ""


def _worth_a_look(nearest: list[Entry]) -> list[Entry]:
    """Return the faults that leave least, each once, and those of the right format beside them."""
    first = {entry[2].words: entry for entry in reversed(nearest)}
    ordered = sorted(first.values(), key=lambda entry: entry[:2])
    chosen = [*ordered[:CLOSELY], *[entry for entry in ordered if entry[2].is_same_kind][:CLOSELY]]
    return list({entry[2].words: entry for entry in chosen}.values())


def _conventions(case: Failing) -> Iterator[list[Any]]:
    """List the arguments with one of them quantized by another convention."""
    for position, quantization in case.subject.inputs.items():
        source = case.arguments[position]
        if quantization.is_packed or not isinstance(source, Tensor):
            continue
        for choice in range(len(quantization.choices)):
            values = quantization.ideal(source, choice)
            yield [*case.ideal[:position], values, *case.ideal[position + 1 :]]


def _affordable(case: Failing) -> Iterator[Variation]:
    """List faults as long as their cost is bounded, counted in elements that are computed."""
    tensors = [x for x in (*case.ideal, case.actual) if isinstance(x, Tensor)]
    cost = sum(tensor.numel() for tensor in tensors)
    return itertools.islice(_variations(case), max(MOST_WORK // max(cost, 1), 1))


def _variations(case: Failing) -> Iterator[Variation]:
    like, ideal = case.subject.like, case.ideal
    for fault in operator_faults(like, ideal):
        yield Variation(fault.words, fault.within(like), ideal)
    for reading in wrong_readings(ideal, list(case.subject.inputs)):
        yield Variation(reading.words, like, reading.arguments)
    for faulty in faulty_arguments(case):
        others, is_same_kind = faulty.others, faulty.cast.is_same_kind
        yield Variation(faulty.words, like, faulty.arguments, others, is_same_kind)


def _values(like: Function, arguments: list[Any]) -> Tensor | None:
    try:
        return evaluate(like, arguments)
    except LENGTH_REFUSALS:
        return None
