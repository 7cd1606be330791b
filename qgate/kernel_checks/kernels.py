"""The check of a kernel: expected results, relations on derived inputs, repeatability."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgate.errors import unknown
from qgate.expected.conventions import MSE, searched_error
from qgate.expected.derived import RELATIONS, DerivedInput, find_axes
from qgate.expected.distances import distance_to_multiple, relative_error
from qgate.expected.narrow_floats import is_wide_float
from qgate.expected.products import find_product
from qgate.kernel_checks.accepted import hold_accepted
from qgate.kernel_checks.arithmetic import account, describe
from qgate.kernel_checks.casts import WORTH_A_SEARCH
from qgate.kernel_checks.declared import to_array
from qgate.kernel_checks.diagnosis import explain
from qgate.kernel_checks.record import CheckFailure, CheckReport
from qgate.kernel_checks.references import hold_reference, settle_reference
from qgate.kernel_checks.runs import (
    EXAMPLE,
    Failing,
    KernelRun,
    check_invariance,
    check_repeats,
    check_steadiness,
    comparable,
    derived_inputs,
    note_refusals,
    run_kernel,
    try_input,
)
from qgate.kernel_checks.subject import (
    RESULT,
    Choices,
    KernelSubject,
    make_subject,
)


def check_kernel(
    kernel: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    like: Callable[..., Any],
    inputs: Mapping[int, Any] | Sequence[Any] | None,
    output: Any,
    convention: str | None,
    pack: dict[int, Callable[..., Any]] | None,
    unpack: Callable[..., Any] | None,
    shapes: Sequence[Sequence[tuple[int, ...]]],
    relations: Sequence[str] | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    arithmetic: str,
    invariant: bool,
    limit: float | None,
    accept: Path | None,
    seed: int,
) -> CheckReport:
    """Hold a kernel at what ideally quantized arguments give; CheckFailure says the cause."""
    example = [_moved(argument, dtype, device) for argument in arguments]
    subject = make_subject(
        kernel,
        example,
        like=like,
        inputs=inputs,
        output=output,
        pack=pack,
        unpack=unpack,
        arithmetic=arithmetic,
        convention=convention,
    )
    chosen = _checked_relations(relations)
    report = CheckReport(subject.name)
    subject, exact = settle_reference(subject, example)
    _check_example(exact, subject)
    choices: Choices = dict.fromkeys(subject.slots, 0)
    ideal = subject.values(example, choices)
    report.format_error = relative_error(ideal, exact)
    _check_limit(limit, report.format_error)
    run = KernelRun(EXAMPLE, example, run_kernel(subject, example, exact.shape, EXAMPLE, report))
    report.error = relative_error(run.actual, exact)
    if convention == MSE:
        if invariant:
            raise ValueError(
                "invariant=True needs derived inputs, which convention 'mse' has none of; check "
                "the kernel at fixed scales, or leave one of the two out."
            )
        _check_searched(subject, run, report)
    else:
        derived = derived_inputs(subject, example, chosen, shapes, seed, report)
        runs = _check_exactly(subject, run, derived, report)
        if invariant:
            check_invariance(subject, run, runs, report)
        note_refusals(derived, report)
    hold_reference(subject, example)
    if limit is not None and not report.error <= limit:
        raise CheckFailure(
            f"{subject.name} has a relative error of {report.error:.4g} against unquantized "
            f"values, limit {limit:g}; an ideal kernel has {report.format_error:.4g}",
            report,
        )
    if accept is not None:
        hold_accepted(accept, report)
    return report


def _moved(argument: Any, dtype: torch.dtype | None, device: torch.device | str | None) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    moved = argument.detach()
    moved = moved if device is None else moved.to(device)
    return moved.to(dtype) if dtype is not None and is_wide_float(moved) else moved


def _slot_name(slot: Any) -> str:
    return RESULT if slot == RESULT else f"argument {slot}"


# What can be used ---------------------------------------------------------------------------------


def _checked_relations(relations: Sequence[str] | None) -> tuple[str, ...]:
    if relations is None:
        return tuple(RELATIONS)
    if isinstance(relations, str):
        relations = [relations]
    for relation in relations:
        if relation not in RELATIONS:
            raise ValueError(str(unknown("relation", relation, RELATIONS)))
    return tuple(relations)


def _check_example(exact: Tensor, subject: KernelSubject) -> None:
    """Refuse an example under which a kernel that does nothing would pass."""
    like = getattr(subject.like, "__name__", "like")
    if not exact.numel():
        raise ValueError(f"{like} gives an empty result for the example; give one with values.")
    if not bool(exact.isfinite().all()):
        raise ValueError(f"{like} gives NaN or Inf for the example; give one with finite results.")
    if bool((exact == exact.reshape(-1)[0]).all()) and exact.numel() > 1:
        raise ValueError(
            f"{like} gives {float(exact.reshape(-1)[0]):g} everywhere for the example, which a "
            "kernel that does nothing may give too; give random values."
        )


def _check_limit(limit: float | None, format_error: float) -> None:
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ValueError(f"limit {limit!r} is not allowed; it is a relative error above zero.")
    if limit < format_error:
        raise ValueError(
            f"limit {limit:g} is below what the format itself costs: an ideal kernel has a "
            f"relative error of {format_error:.4g} for this example. Give a limit above that, or "
            "none: the kernel is held at float noise around the ideal result anyway."
        )


# Judging ------------------------------------------------------------------------------------------


def _check_exactly(
    subject: KernelSubject, run: KernelRun, derived: Sequence[DerivedInput], report: CheckReport
) -> list[KernelRun]:
    """Hold the example and derived inputs within float noise of one convention; return all runs."""
    runs = [run]
    for variant in derived:
        actual = try_input(subject, variant, report)
        if actual is not None:
            runs.append(KernelRun(variant.name, variant.arguments, actual, variant))
    runs = comparable(subject, runs, report)
    choices, failing = _fit(subject, runs)
    report.conventions = {
        _slot_name(slot): quantization.choices[choices[slot]].name
        for slot, quantization in subject.slots.items()
    }
    accounted = account(subject, runs, choices, failing) if failing else None
    if failing and accounted is None:
        hold_reference(subject, run.arguments)
        check_steadiness(failing[0], report)
        raise explain(failing, len(runs), report)
    if accounted is not None:
        report.conventions["arithmetic"] = describe(accounted)
    check_repeats(subject, runs[0], report)
    report.held = [each.name for each in runs]
    _measure_power(subject, runs[0], choices, report)
    return runs


def _fit(subject: KernelSubject, runs: Sequence[KernelRun]) -> tuple[Choices, list[Failing]]:
    """Find the conventions that explain all runs, or those that come nearest."""
    definition: Choices = dict.fromkeys(subject.slots, 0)
    failing = list(_failing(subject, runs, definition))
    if not failing:
        return definition, []
    best = definition, failing
    first = next(run for run in runs if run.name == failing[0].name)
    candidates = _nearest(subject, failing[0], definition)
    for number, choices in enumerate(candidates):
        if number == 0 or next(_failing(subject, [first], choices), None) is None:
            failing = list(_failing(subject, runs, choices))
            if number == 0 or len(failing) < len(best[1]):
                best = choices, failing
            if not failing:
                break
    return best


def _nearest(subject: KernelSubject, failing: Failing, start: Choices) -> list[Choices]:
    """List the conventions whose expected values are nearest to an actual result."""
    if all(len(quantization.choices) == 1 for quantization in subject.slots.values()):
        return []

    def distance_of(choices: Choices) -> float:
        values = subject.values(failing.arguments, choices)
        return distance_to_multiple(failing.actual, values)

    current, nearest = start, distance_of(start)
    distances = [(nearest, start)]
    for _ in range(2):
        before = nearest
        for changed in _neighbors(subject, current):
            distance = distance_of(changed)
            distances.append((distance, changed))
            if distance < nearest:
                current, nearest = changed, distance
        if nearest == before:
            break
    # The definition stays unless another convention is clearly nearer.
    distances[0] = (distances[0][0] / 2, start)
    distances.sort(key=lambda entry: entry[0])
    return [choices for _, choices in distances[:6]]


def _neighbors(subject: KernelSubject, current: Choices) -> Iterator[Choices]:
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
    subject: KernelSubject, runs: Sequence[KernelRun], choices: Choices
) -> Iterator[Failing]:
    for run in runs:
        expected = subject.expected(run.arguments, choices)
        wrong = expected.outside(run.actual)
        if bool(wrong.any()):
            about = run.name, run.arguments, run.actual
            yield Failing(subject, choices, *about, expected, wrong)


def _check_searched(subject: KernelSubject, run: KernelRun, report: CheckReport) -> None:
    """Hold the error of a kernel with searched scales in a band around that of our own search."""
    ideal_error = report.format_error
    shares = []
    for position, quantization in subject.inputs.items():
        if quantization.quantizer is None:
            raise ValueError(f"convention 'mse' needs a format, not {quantization.name}.")
        x = run.arguments[position].double()
        best = searched_error(to_array(x), quantization.quantizer)
        mine = relative_error(quantization.ideal(x), x)
        shares.append(best / mine if mine else 1.0)
    best_error = ideal_error * (sum(shares) / len(shares) if shares else 1.0)
    low, high = 0.7 * best_error, 1.15 * max(best_error, ideal_error)
    report.conventions = {
        _slot_name(slot): "searched scales, held by their error alone" for slot in subject.inputs
    }
    if report.error > WORTH_A_SEARCH * best_error:
        choices, failing = _fit(subject, [run])
        if not failing:
            slots = ", ".join(_slot_name(slot) for slot in subject.slots)
            names = ", ".join(
                dict.fromkeys(q.choices[choices[slot]].name for slot, q in subject.slots.items())
            )
            raise CheckFailure(
                f"{subject.name} is wrong: scales of {slots} were not searched for ({names} "
                f"explains all values)",
                report,
                f"relative error {report.error:.4g}, of searched scales about {best_error:.4g}",
            )
    if not low <= report.error <= high:
        raise CheckFailure(
            f"{subject.name} has a relative error of {report.error:.4g} against unquantized "
            f"values; searched scales give {low:.4g} to {high:.4g}",
            report,
        )
    check_repeats(subject, run, report)
    report.held = [EXAMPLE]
    report.left_out["derived inputs"] = "searched scales have no exact expected result"


# Figures ------------------------------------------------------------------------------------------


def _measure_power(
    subject: KernelSubject, run: KernelRun, choices: Choices, report: CheckReport
) -> None:
    """Work out the smallest defects that the bounds would have caught on the example."""
    expected = subject.expected(run.arguments, choices)
    values = expected.values
    low, high = expected.bounds(run.actual.dtype)
    outward = torch.where(values < 0, -low, high)
    # A result beyond a bound still rounds to it, up to half the step of the dtype there.
    _, exponents = torch.frexp(outward)
    step = torch.finfo(run.actual.dtype).eps / 2 * torch.exp2(exponents.double())
    room = outward + step / 2 - values.abs()
    rms = float(values.square().mean().sqrt())
    report.noise = float(room.median()) / rms
    usable = values != 0
    if bool(usable.any()):
        share = (room[usable] / values[usable].abs()).min()
        report.smallest_defect["a factor on all values"] = float(share)
    report.smallest_defect["one typical value, of the RMS"] = report.noise
    ideal = subject.ideal(run.arguments, choices)
    product = (
        None if subject.output else find_product(ideal, find_axes(subject.like, ideal), values)
    )
    if product is not None:
        report.smallest_defect[f"the weakest of {product.axis.length:,} terms of a sum"] = (
            product.smallest_share(ideal, room)
        )
