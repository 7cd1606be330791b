"""Why a kernel failed: the fault that explains its result, then where and by how much."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgate.causes.casts import WrongCast, wrong_casts
from qgate.causes.outputs import (
    describe_cut,
    describe_places,
    describe_ruin,
    describe_whole,
    scattered,
)
from qgate.causes.readings import wrong_readings
from qgate.causes.terms import find_range_fault, find_term_fault
from qgate.expected.derived import find_axes
from qgate.expected.noise import Expected, evaluate, longest_dimension
from qgate.expected.products import find_product
from qgate.kernel_checks.declared import from_array, to_array
from qgate.kernel_checks.dependence import describe_dependence
from qgate.kernel_checks.record import CheckFailure, CheckReport
from qgate.kernel_checks.runs import EXAMPLE, LENGTH_REFUSALS
from qgate.kernel_checks.subject import RESULT, Choices, KernelSubject

UNEXPLAINED = 0.02
"""The share of a residual's energy that may be left when lost terms are called the cause."""
NEAR = 0.02
"""Relative RMS distance from which on another explanation is held at float noise of its own."""
WEAKEST_NOISE = 0.1
"""RMS error of a coarser arithmetic, in units of the effect of one rounding of every input."""


@dataclass(frozen=True)
class Failing:
    """One input at which the kernel is wrong, and where."""

    name: str
    arguments: list[Any]
    actual: Tensor
    expected: Expected
    wrong: Tensor


def explain(
    subject: KernelSubject,
    choices: Choices,
    failing: Sequence[Failing],
    count: int,
    report: CheckReport,
) -> CheckFailure:
    """Return the failure of a kernel, with its cause in the first line."""
    case = _plainest(failing)
    cause = diagnose(subject, choices, case)
    where = "" if case.name == EXAMPLE else f" for {case.name}"
    details = [_worst(case), _size(case)]
    if len(failing) > 1:
        also = [other.name for other in failing if other is not case]
        more = f" and {len(also) - 3} more" if len(also) > 3 else ""
        agree = count - len(failing)
        details.append(
            f"also wrong for {'; '.join(also[:3])}{more}; {agree} input{'s' * (agree != 1)} agree"
        )
    elif count > 1:
        details.append(f"{count - 1} other inputs agree")
    details += [
        f"nearest convention of {position}: {name}"
        for (position, name), choice in zip(
            report.conventions.items(), choices.values(), strict=True
        )
        if choice
    ]
    return CheckFailure(f"{subject.name} is wrong{where}: {cause}", details, report)


def _plainest(failing: Sequence[Failing]) -> Failing:
    """Return the example, or else the smallest derived input that is wrong in part only."""
    if failing[0].name == EXAMPLE:
        return failing[0]
    partly = [case for case in failing if not bool(case.wrong.all())]
    return min(partly or failing, key=lambda case: case.wrong.numel())


def _worst(case: Failing) -> str:
    low, high = case.expected.bounds(case.actual.dtype)
    beyond = torch.maximum(low - case.actual.double(), case.actual.double() - high)
    beyond = torch.where(case.wrong, beyond.nan_to_num(torch.inf, torch.inf, torch.inf), -torch.inf)
    flat = int(beyond.argmax()) if beyond.dim() else 0
    index = np.unravel_index(flat, case.actual.shape)
    position = ", ".join(str(int(i)) for i in index)
    actual, value, least, most = (
        float(tensor.reshape(-1)[flat]) for tensor in (case.actual, case.expected.values, low, high)
    )
    return (
        f"worst at [{position}]: {actual:.6g}, expected {value:.6g} (float noise "
        f"allows {least:.6g} to {most:.6g})"
    )


def _size(case: Failing) -> str:
    energy = float(case.expected.values.nan_to_num(0.0, 0.0, 0.0).square().mean())
    difference = (case.actual.double() - case.expected.values).nan_to_num(0.0, 0.0, 0.0)
    share = (float(difference.square().mean()) / energy) ** 0.5 if energy else 0.0
    return (
        f"{int(case.wrong.sum()):,} of {case.wrong.numel():,} values are outside float noise; RMS "
        f"error {share:.3g} of the expected RMS"
    )


def diagnose(subject: KernelSubject, choices: Choices, case: Failing) -> str:
    """Say what is wrong with one result in a few words."""
    words = describe_ruin(case.actual, case.expected, case.wrong)
    if words:
        return words
    for source in (_lost_term, _wrong_cast, _lost_entry):
        words = source(subject, choices, case)
        if words:
            return words
    words = describe_whole(case.actual, case.expected, case.wrong)
    words = words or _wrong_reading(subject, choices, case)
    if words:
        return words
    places = describe_places(case.actual, case.expected, case.wrong)
    if places.endswith("zero"):
        return places
    words = describe_cut(case.actual, case.expected, case.wrong)
    if words:
        return words
    words = "" if places else _coarse_arithmetic(subject, choices, case)
    words = words or describe_dependence(
        subject, choices, case.arguments, case.expected, case.wrong
    )
    return ": ".join(part for part in (places, words) if part) or scattered(case.wrong)


def _wrong_cast(subject: KernelSubject, choices: Choices, case: Failing) -> str:
    """Replace ideal casts by faulty ones until one explains the result."""
    ideal = subject.ideal(case.arguments, choices)
    width = (case.expected.high - case.expected.low) / 2
    values: dict[tuple[Any, int], Tensor | None] = {}
    for slots, number, cast in _suspects(subject):
        changed = list(ideal)
        if slots == [RESULT]:
            before = evaluate(subject.like, ideal)
            result = _faulty(cast, before)
        else:
            for position in slots:
                if (position, number) not in values:
                    values[position, number] = _faulty(cast, case.arguments[position])
                changed[position] = values[position, number]
            if any(changed[position] is None for position in slots):
                continue
            result = evaluate(subject.like, changed)
            if subject.output:
                result = subject.output.ideal(result, choices[RESULT])
        if result is None or result.shape != width.shape:
            continue
        explained = Expected(result, result - width, result + width)
        if _explains(explained, case) or (
            slots != [RESULT] and _explains_nearly(subject, choices, case, result, changed)
        ):
            where = "the result" if slots == [RESULT] else f"argument {slots[0]}"
            if len(slots) > 1:
                where = f"each of arguments {', '.join(map(str, slots))}"
            return f"{where} {cast.words}"
    return ""


def _faulty(cast: WrongCast, argument: Any) -> Tensor | None:
    source = argument if isinstance(argument, Tensor) else argument.decode(torch.float64)
    values = cast.apply(to_array(source))
    return None if values is None else from_array(values, source)


def _explains(expected: Expected, case: Failing) -> bool:
    return not bool(expected.outside(case.actual).any())


def _explains_nearly(
    subject: KernelSubject, choices: Choices, case: Failing, result: Tensor, arguments: list[Any]
) -> bool:
    """Say if values near the actual ones are as near as the float noise of other arguments."""
    actual = case.actual.double()
    if not float((actual - result).square().sum()) < NEAR**2 * float(result.square().sum()):
        return False
    return _explains(subject.expected_from(arguments, choices), case)


def _suspects(subject: KernelSubject) -> Iterator[tuple[list[Any], int, WrongCast]]:
    """List numbered faulty casts of arguments, of some in one format together, of the result."""
    groups: list[list[Any]] = [[slot] for slot in subject.slots]
    for same in _alike(subject):
        groups += [list(some) for size in (2, 3) for some in itertools.combinations(same, size)]
    for group in groups:
        settings = subject.slots[group[0]].quantizer
        if settings is not None:
            yield from ((group, number, cast) for number, cast in enumerate(wrong_casts(settings)))


def _alike(subject: KernelSubject) -> list[list[Any]]:
    """List the positions of arguments that are quantized in the same way."""
    kinds: dict[str, list[Any]] = {}
    for position, quantization in subject.inputs.items():
        kinds.setdefault(f"{quantization.name} {quantization.quantizer!r}", []).append(position)
    return list(kinds.values())


def _lost_term(subject: KernelSubject, choices: Choices, case: Failing) -> str:
    """Name terms of a product that are missing or counted twice."""
    if subject.output:
        return ""
    ideal = subject.ideal(case.arguments, choices)
    axes = find_axes(subject.like, ideal)
    product = find_product(ideal, axes, case.expected.values)
    if product is None:
        return ""
    residual = (case.actual.double() - case.expected.values).nan_to_num(0.0, 0.0, 0.0)
    rounding = torch.finfo(case.actual.dtype).eps / 2 * float(case.expected.values.norm())
    energy = float(residual.square().sum())
    allowed = max(UNEXPLAINED * energy, rounding**2)
    fault = find_term_fault(product, residual, ideal, allowed) or find_range_fault(
        product, residual, ideal, allowed
    )
    if fault is None:
        return ""
    is_one = fault.count == 1
    which = (
        f"term {fault.first}" if is_one else f"{fault.count} terms, {fault.first} to {fault.last},"
    )
    words = fault.fault(plural=not is_one).replace("missing", "lost")
    return f"{which} of the sum over {product.axis.length:,} ({product.axis}) {words}"


def _lost_entry(subject: KernelSubject, choices: Choices, case: Failing) -> str:
    """Name an entry of an inner axis without which the reference gives the actual result."""
    ideal = subject.ideal(case.arguments, choices)
    width = (case.expected.high - case.expected.low) / 2
    for axis in find_axes(subject.like, ideal):
        if not axis.is_inner or axis.length > 256:
            continue
        for index in range(axis.length):
            remaining = torch.tensor([i for i in range(axis.length) if i != index])
            result = evaluate(subject.like, axis.take(ideal, remaining))
            if subject.output:
                result = subject.output.ideal(result, choices[RESULT])
            if result.shape == width.shape and not bool(
                Expected(result, result - width, result + width).outside(case.actual).any()
            ):
                return f"entry {index} of {axis.length} ({axis}) is left out"
    return ""


def _wrong_reading(subject: KernelSubject, choices: Choices, case: Failing) -> str:
    """Name another reading of an argument under which the reference gives the actual result."""
    ideal = subject.ideal(case.arguments, choices)
    width = (case.expected.high - case.expected.low) / 2
    for reading in wrong_readings(ideal, list(subject.inputs)):
        try:
            result = evaluate(subject.like, reading.arguments)
        except LENGTH_REFUSALS:
            continue
        if result.shape != width.shape:
            continue
        if subject.output:
            result = subject.output.ideal(result, choices[RESULT])
        explained = Expected(result, result - width, result + width)
        if _explains(explained, case) or _explains_nearly(
            subject, choices, case, result, reading.arguments
        ):
            return reading.words
    return _wrong_weight(subject, case, ideal)


def _wrong_weight(subject: KernelSubject, case: Failing, ideal: list[Any]) -> str:
    """Name an argument of which the result holds another multiple than the reference's."""
    if subject.output or not bool(case.actual.isfinite().all()):
        return ""
    width = (case.expected.high - case.expected.low) / 2
    actual, expected = case.actual.double(), case.expected.values
    for position, argument in enumerate(ideal):
        if not (isinstance(argument, Tensor) and argument.is_floating_point()):
            continue
        changed = list(ideal)
        changed[position] = torch.zeros_like(argument)
        share = expected - evaluate(subject.like, changed)
        energy = float(share.square().sum())
        if not 0 < energy < math.inf:
            continue
        factor = 1 + float(((actual - expected) * share).sum()) / energy
        result = expected + (factor - 1) * share
        bounds = Expected(result, result - width, result + width)
        if not bool(bounds.outside(case.actual).any()):
            return f"argument {position} counts {factor:.4g} times in the result"
    return ""


def _coarse_arithmetic(subject: KernelSubject, choices: Choices, case: Failing) -> str:
    """Name the coarser arithmetic that an error which looks like rounding comes from."""
    difference = (case.actual.double() - case.expected.values).nan_to_num(0.0, 0.0, 0.0)
    if float(case.wrong.double().mean()) < 0.05:
        return ""
    size = float(difference.square().mean().sqrt())
    longest = longest_dimension(subject.ideal(case.arguments, choices))
    ratios: dict[str, float] = {}
    for arithmetic in ("tf32", "bfloat16"):
        coarse = subject.expected(case.arguments, choices, arithmetic)
        if coarse.sigma is None or bool(coarse.outside(case.actual).any()):
            continue
        ratio = size / float(coarse.sigma.square().mean().sqrt())
        if WEAKEST_NOISE < ratio < 2 * max(1.0, longest**0.5 / 4):
            ratios[arithmetic] = ratio
    if not ratios:
        return ""
    nearest = min(ratios, key=lambda arithmetic: abs(math.log(ratios[arithmetic])))
    name = "float16 or tf32" if nearest == "tf32" else nearest
    return (
        f"errors look like rounding: sums in {name}, "
        f"not in {subject.arithmetic} (declare arithmetic={nearest!r} if that is meant)"
    )
