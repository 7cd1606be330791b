"""Faults that are tried: the reference computed with each, and the one that explains the result.

A kernel in 16 bits rounds on its way, so no fault gives its bits. What a fault leaves unexplained
is compared with what the reference leaves, with what factors leave, and with the roundings of such
kernels; the fault that leaves least is named where that is no more than roundings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from qgate.causes.element_faults import is_half
from qgate.causes.faults import Fault, Function, WrongCall
from qgate.causes.operator_faults import general_operator_faults, operator_faults
from qgate.causes.readings import wrong_readings
from qgate.causes.regroupings import late_arguments, regroupings
from qgate.expected.intermediates import HALVES
from qgate.expected.noise import Expected, evaluate, expect
from qgate.kernel_checks.closeness import FunctionFit, energy_left
from qgate.kernel_checks.explanations import MOST_WORK, TriedCast, work_of
from qgate.kernel_checks.runs import Failing
from qgate.kernel_checks.stage_faults import stage_faults
from qgate.kernel_checks.subject import RESULT
from qgate.models.refusals import LENGTH_REFUSALS

CLOSELY = 6
"""Faults that are explaining at under the roundings of kernels: those that leave least."""
ALIKE = 1.05
"""Times the least energy up to which a plainer fault is named."""
CLOSE = 0.02
"""Relative RMS distance from which on a fault is held at float noise of its own."""
FEWEST = 64
"""Faults that are tried whatever they cost, the plainest ones."""


@dataclass(frozen=True)
class _Entry:
    """A fault, its number, and the energy that it leaves of a result."""

    energy: float
    number: int
    fault: WrongCall | TriedCast

    @property
    def words(self) -> str:
        return self.fault.words

    @property
    def is_same_kind(self) -> bool:
        """Tell if a cast is to the right format: its conventions may differ by more."""
        return isinstance(self.fault, TriedCast) and self.fault.is_same_kind

    def call(self, case: Failing) -> WrongCall:
        if isinstance(self.fault, WrongCall):
            return self.fault
        faulty = self.fault.faulty(case)
        return WrongCall(self.words, case.subject.like, faulty.arguments, faulty.alternatives)


def _nearest(fault: WrongCall, actual: Tensor) -> WrongCall:
    """Return the fault under the convention that leaves least of a result."""
    listed = [fault.arguments, *(fault.alternatives() if fault.alternatives else ())]
    if len(listed) == 1:
        return fault
    energies = [energy_left(actual, _values(fault.change, arguments)) for arguments in listed]
    return replace(fault, arguments=listed[energies.index(min(energies))])


def describe_operator_before_cast(case: Failing) -> str:
    """Name the faulty operator that explains a result which is quantized; empty if none does."""
    subject, output = case.subject, case.subject.output
    if output is None or not bool(case.actual.double().isfinite().any()):
        return ""
    choice, actual = case.choices[RESULT], case.actual.double()
    before = energy_left(actual, case.expected.values)
    width = subject.before_output(case.arguments, case.choices, subject.arithmetic).width
    affordable = max(MOST_WORK // max(work_of(case), 1), FEWEST)
    faults = operator_faults(subject.like, case.ideal, case.residual)
    for fault in itertools.islice(faults, affordable):
        values = _values(fault.within(subject.like), case.ideal)
        if values is None or values.shape != width.shape:
            continue
        if not energy_left(actual, output.ideal(values, choice)) < before:
            continue
        if output.expected(Expected.around(values, width), choice).explains(case.actual):
            return fault.words
    return ""


def describe_variation(case: Failing, casts: Sequence[TriedCast]) -> str:
    """Name the fault that explains a result, but for roundings; empty if none does.

    casts  faulty casts that do not explain it to float noise
    """
    actual = case.actual.double()
    if case.subject.output or not bool(actual.isfinite().any()):
        return ""
    before = energy_left(actual, case.expected.values)
    entries = _tried(case, casts, actual)
    worth = _worth_a_look([entry for entry in entries if entry.energy < before], entries)
    if not worth:
        return ""
    right = WrongCall("", case.subject.like, case.ideal, lambda: _conventions(case))
    plain = _nearest(right, actual)
    reference = FunctionFit.of(case, plain.change, plain.arguments)
    explaining, exact = [], []
    for entry in worth:
        closest = _nearest(entry.call(case), actual)
        if _explains_exactly(case, closest):
            exact.append((entry.number, entry.words))
            continue
        fault = FunctionFit.of(case, closest.change, closest.arguments)
        if not exact and reference.is_explained_by(fault):
            explaining.append((fault.least, entry.number, entry.words))
    if exact:
        return min(exact)[1]
    least = min((energy for energy, _, _ in explaining), default=0.0)
    plainest = [(number, words) for energy, number, words in explaining if energy <= ALIKE * least]
    return min(plainest)[1] if plainest else ""


def _explains_exactly(case: Failing, fault: WrongCall) -> bool:
    """Tell if a fault leaves float noise alone, that of the reference or its own."""
    values = _values(fault.change, fault.arguments)
    if values is None or values.shape != case.expected.width.shape:
        return False
    if Expected.around(values, case.expected.width).explains(case.actual):
        return True
    if not energy_left(case.actual.double(), values) < CLOSE**2 * float(values.square().sum()):
        return False
    arithmetic = case.subject.arithmetic
    return expect(fault.change, fault.arguments, arithmetic=arithmetic).explains(case.actual)


def _tried(case: Failing, casts: Sequence[TriedCast], actual: Tensor) -> list[_Entry]:
    """Compute the faults of operators and arguments as long as their cost is bounded."""
    affordable = max(MOST_WORK // max(work_of(case), 1), FEWEST)
    entries = [
        _Entry(energy_left(actual, _values(fault.change, fault.arguments)), number, fault)
        for number, fault in enumerate(itertools.islice(_variations(case), affordable))
    ]
    return entries + [
        _Entry(cast.energy, affordable + number, cast) for number, cast in enumerate(casts)
    ]


def _worth_a_look(nearer: list[_Entry], entries: list[_Entry]) -> list[_Entry]:
    """Return the faults that leave least, each once, and those of the right format beside them."""
    same_kind = [entry for entry in entries if entry.is_same_kind]
    chosen: dict[str, _Entry] = {}
    for listed in (nearer, same_kind):
        first: dict[str, _Entry] = {}
        for entry in sorted(listed, key=lambda entry: (entry.energy, entry.number)):
            if math.isfinite(entry.energy):
                first.setdefault(entry.words, entry)
        chosen |= dict(list(first.items())[:CLOSELY])
    return list(chosen.values())


def _conventions(case: Failing) -> Iterator[list[Any]]:
    """List the arguments with one of them quantized by another convention."""
    for position, quantization in case.subject.inputs.items():
        source = case.arguments[position]
        if quantization.is_packed or not isinstance(source, Tensor):
            continue
        for choice in range(len(quantization.choices)):
            values = quantization.ideal(source, choice)
            yield [*case.ideal[:position], values, *case.ideal[position + 1 :]]


def _variations(case: Failing) -> Iterator[WrongCall]:
    like, ideal = case.subject.like, case.ideal
    tensors = [case.actual, *(x for x in case.arguments if isinstance(x, Tensor))]
    has_halves = any(tensor.dtype in HALVES for tensor in tensors)
    for stage in stage_faults(case):
        yield WrongCall(stage.words, stage.change, ideal)
    for fault in operator_faults(like, ideal, case.residual):
        if not (has_halves and is_half(fault.words)):
            yield WrongCall(fault.words, fault.within(like), ideal)
    for swap in swapped_scales(case):
        yield WrongCall(swap.words, like, swap.change)
    yield from regroupings(like, ideal, case.actual)
    for reading in wrong_readings(ideal, list(case.subject.inputs)):
        try:
            case.subject.try_on_host(reading.change)
        except LENGTH_REFUSALS:  # of a position out of range, which would end a device
            continue
        yield WrongCall(reading.words, like, reading.change)
    for fault in general_operator_faults(like, ideal):
        yield WrongCall(fault.words, fault.within(like), ideal)
    yield from late_arguments(like, ideal, case.actual)


def _values(like: Function, arguments: list[Any]) -> Tensor | None:
    try:
        return evaluate(like, arguments)
    except LENGTH_REFUSALS:
        return None


def swapped_scales(case: Failing) -> Iterator[Fault[list[Any]]]:
    """List arguments that are decoded with the scales of others."""
    scales = case.subject.scales(case.arguments, case.choices)
    for first, second in itertools.permutations(scales, 2):
        ratio = _ratio(scales[first], scales[second])
        if ratio is None:
            continue
        changed = list(case.ideal)
        changed[first] = case.ideal[first] * ratio
        yield Fault(f"argument {first} is decoded with the scale of argument {second}", changed)
        if first < second:
            swapped = list(changed)
            back = _ratio(scales[second], scales[first])
            if back is not None:
                swapped[second] = case.ideal[second] * back
                yield Fault(f"the scales of arguments {first} and {second} are swapped", swapped)


def _ratio(own: Tensor, other: Tensor) -> Tensor | None:
    """Return what scales of another argument are of an argument's own, for each element of it."""
    if not own.numel() or not other.numel() or bool((own == 0).any()):
        return None
    if bool((other == other.reshape(-1)[0]).all()):
        return other.reshape(-1)[0] / own
    by_row = [side for side in (own, other) if side.dim() == 2]
    if len(by_row) < 2 or len(own) != len(other):
        return None
    if any(bool((side != side[:, :1]).any()) for side in by_row):
        return None
    return (other[:, :1] / own[:, :1]).expand_as(own)
