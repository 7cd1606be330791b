"""Runs of a kernel: at the example, at derived inputs and other shapes, and repeatedly."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qgate.device_errors import LostDeviceError, lost_device
from qgate.expected.derived import DerivedInput, are_independent
from qgate.expected.narrow_floats import same_bits
from qgate.expected.noise import Expected
from qgate.kernel_checks.record import CheckFailure, CheckReport
from qgate.kernel_checks.subject import (
    Choices,
    KernelRefusal,
    KernelSubject,
    UnusableResult,
)
from qgate.kernel_checks.watching import HUNG

EXAMPLE = "the example"
REFUSED = "the kernel refused"
"""Words with which a reason begins where a kernel raised an exception."""
REPETITIONS = 3
STEADY = 2.0
"""Widths of float noise up to which a second run of a wrong kernel says nothing about the cause."""
REFUSALS = (ValueError, TypeError, RuntimeError, AssertionError)
"""Exceptions with which a module says that it does not take an input."""
LENGTH_REFUSALS = (*REFUSALS, IndexError)
"""Those of a whole model at a length that it was not made for: tables of positions end."""


@dataclass(frozen=True)
class KernelRun:
    """One input, and what the kernel made of it."""

    name: str
    arguments: list[Any]
    actual: Tensor
    source: DerivedInput | None = None


@dataclass(frozen=True)
class Failing:
    """One input at which a kernel is wrong under its nearest conventions, and where."""

    subject: KernelSubject
    choices: Choices
    name: str
    arguments: list[Any]
    actual: Tensor
    expected: Expected
    wrong: Tensor

    @cached_property
    def ideal(self) -> list[Any]:
        """Return the ideally quantized arguments."""
        return self.subject.ideal(self.arguments, self.choices)

    @property
    def residual(self) -> Tensor:
        """Return the difference from the expected values, 0 where one of both is not finite."""
        return (self.actual.double() - self.expected.values).nan_to_num(0.0, 0.0, 0.0)

    def result_of(self, arguments: Sequence[Any]) -> Tensor:
        """Return what would be expected of other quantized arguments.

        Where arguments lie on a device, the CPU is asked first: other integers may be out of range.
        """
        self.subject.try_on_host(arguments)
        return self.subject.values_of(arguments, self.choices)


def try_input(subject: KernelSubject, variant: DerivedInput, report: CheckReport) -> Tensor | None:
    """Run a derived input; list what reference, format or kernel refuse, with the reason."""
    lacking = [quantization for quantization in subject.slots.values() if not quantization.has_nan]
    if variant.relation == "nan" and lacking:
        report.left_out[variant.name] = f"{lacking[0].name} has no NaN"
        return None
    if variant.relation in ("large", "small") and subject.slots:
        fixed = [q for q in subject.slots.values() if not q.follows_magnitude]
        if fixed:
            report.left_out[variant.name] = f"{fixed[0].name} has no scale made from the values"
            return None
    if variant.name in HUNG.get():
        report.left_out[variant.name] = HUNG.get()[variant.name]
        return None
    try:
        shape = _shape_of_reference(subject, variant.arguments)
    except Exception as error:
        if lost_device(error):
            raise
        report.left_out[variant.name] = f"the reference refused: {first_line(error)}"
        return None
    try:
        return run_kernel(subject, variant.arguments, shape, variant.name, report)
    except (CheckFailure, LostDeviceError):
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, KernelRefusal) else None
        report.left_out[variant.name] = f"{REFUSED}: {first_line(cause or error)}"
        return None


def note_refusals(derived: Sequence[DerivedInput], report: CheckReport) -> None:
    """Say aloud that a kernel was checked at its example alone, as it refuses all else."""
    reasons = [report.left_out.get(variant.name, "") for variant in derived]
    refused = [reason for reason in reasons if reason.startswith(REFUSED)]
    if refused and len(refused) == len(reasons):
        report.notes.append(
            f"only the example was checked: {report.name} refused all {len(refused)} derived inputs"
        )


def _shape_of_reference(subject: KernelSubject, arguments: list[Any]) -> torch.Size:
    """Return the shape of the expected result; the CPU is asked first, where nothing is lost."""
    subject.try_on_host(arguments)
    return subject.unquantized(arguments).shape


def first_line(error: BaseException) -> str:
    """Return an exception as its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:100]}" if lines else type(error).__name__


def run_kernel(
    subject: KernelSubject,
    arguments: list[Any],
    shape: torch.Size,
    name: str,
    report: CheckReport,
) -> Tensor:
    """Call the kernel; CheckFailure if it gives nothing that can be compared with the reference.

    What it raises at the example is its failure, elsewhere a refusal of the input.
    """
    try:
        actual = subject.run(arguments, name)
    except KernelRefusal as refusal:
        error = refusal.__cause__
        if name != EXAMPLE or error is None:
            raise
        words = first_line(error)
        raise CheckFailure(
            f"{subject.name} raised {type(error).__name__} for {name}"
            + words.removeprefix(type(error).__name__),
            report,
        ) from error
    except UnusableResult as error:
        if error.kind == "NoneType":
            raise CheckFailure(
                f"{subject.name} returns nothing (None) for {name}, right is {_shape_words(shape)}",
                report,
                "a kernel that writes into an argument is checked by a function that returns it",
            ) from None
        if name == EXAMPLE:
            raise
        raise CheckFailure(
            f"{subject.name} returns {error.kind} for {name}, a tensor of values for the example",
            report,
        ) from None
    if actual.shape != shape:
        raise CheckFailure(
            f"{subject.name} returns {_shape_words(actual.shape)} for {name}, right is "
            f"{_shape_words(shape)}",
            report,
        )
    _check_changes(subject, name, report)
    return actual


def _shape_words(shape: torch.Size) -> str:
    return f"shape {tuple(shape)}" if len(shape) else "one number, without dimensions"


def _check_changes(subject: KernelSubject, name: str, report: CheckReport) -> None:
    """Refuse arguments that are changed in place, but for those that the kernel returns."""
    for position, is_result in subject.in_place.items():
        if is_result or position in subject.changed:
            why = " and returned" if is_result else ", as the reference does"
            note = f"argument {position} is changed in place{why}"
            if note not in report.notes:
                report.notes.append(note)
            continue
        where = "" if name == EXAMPLE else f" for {name}"
        raise CheckFailure(
            f"{subject.name} changes argument {position} in place{where}; the reference does not",
            report,
            "if that is meant, return the argument, or pass a copy: lambda x: kernel(x.clone())",
        )


def check_repeats(
    subject: KernelSubject, run: KernelRun, report: CheckReport, noise: Expected | None = None
) -> None:
    """Run the same input twice more; other bits within the float noise, if given, are a note."""
    for number in range(2, REPETITIONS + 1):
        try:
            repeated = subject.run(run.arguments, f"{run.name}, run {number}")
        except KernelRefusal as refusal:
            error = refusal.__cause__ or refusal
            raise CheckFailure(
                f"{subject.name} raised {type(error).__name__} in run {number} of the same input",
                report,
                first_line(error),
            ) from error
        same = (repeated == run.actual) | (repeated.isnan() & run.actual.isnan())
        if bool(same.all()):
            continue
        if noise is None or not noise.explains(repeated):
            raise _not_repeatable(subject, run.arguments, ~same, number, report)
        report.notes.append(
            f"other bits in run {number} of the same input: {int((~same).sum()):,} of "
            f"{same.numel():,} values, within float noise (repeatable=True forbids it)"
        )
        return


def check_steadiness(failing: Failing, report: CheckReport) -> None:
    """Say of a kernel that is wrong that a second run differs by more than float noise."""
    subject = failing.subject
    try:
        repeated = subject.run(failing.arguments, f"{failing.name}, run 2")
    except KernelRefusal:
        return
    if repeated.shape == failing.actual.shape:
        change = (repeated.double() - failing.actual.double()).nan_to_num(0.0, 0.0, 0.0).abs()
        different = change > STEADY * failing.expected.width
        if bool(different.any()):
            raise _not_repeatable(subject, failing.arguments, different, 2, report)


def _not_repeatable(
    subject: KernelSubject, arguments: list[Any], different: Tensor, run: int, report: CheckReport
) -> CheckFailure:
    devices = {v.device for v in arguments if isinstance(v, Tensor) and v.device.type == "cuda"}
    seeded: list[Tensor] = []
    steady: list[Tensor] = []
    with contextlib.suppress(KernelRefusal):
        steady = [subject.run(arguments) for _ in range(2)]
    with torch.random.fork_rng(devices=devices), contextlib.suppress(KernelRefusal):
        for _ in range(2):
            torch.manual_seed(0)
            seeded.append(subject.run(arguments))
    if len(steady) == 2 and same_bits(*steady):
        why = ": it depends on the calls before (a counter? a cache by address?)"
    elif len(seeded) == 2 and same_bits(*seeded):
        why = ": it draws random numbers (with the same seed two calls give the same bits)"
    else:
        why = ""
    return CheckFailure(
        f"{subject.name} is not repeatable: {int(different.sum()):,} of {different.numel():,} "
        f"values differ in run {run} of the same input{why}",
        report,
    )


def check_invariance(
    subject: KernelSubject, example: KernelRun, runs: Sequence[KernelRun], report: CheckReport
) -> None:
    """Hold rows that were cut from the first argument at the example's bits."""
    check_repeats(subject, example, report)
    compared = 0
    for run in runs:
        if run.source is None or run.source.cut is None:
            continue
        axis, entries = run.source.cut
        if axis.output is None or not axis.cuts_rows:
            continue
        whole, part = (subject.unquantized(source.arguments) for source in (example, run))
        if not are_independent(whole, part, axis.output, entries):
            continue
        compared += 1
        before = example.actual.index_select(axis.output, entries.to(example.actual.device))
        same = (run.actual == before) | (run.actual.isnan() & before.isnan())
        if not bool(same.all()):
            difference = (run.actual.double() - before.double()).abs().max()
            rms = before.double().square().mean().sqrt()
            raise CheckFailure(
                f"{subject.name} is not batch-invariant: {int((~same).sum()):,} of "
                f"{same.numel():,} values differ from the example's for {run.name}",
                report,
                f"largest difference {float(difference):.3g}, {float(difference / rms):.2g} of "
                "the RMS; float noise would allow it",
            )
    if not compared:
        raise ValueError(
            "invariant=True has nothing to compare: no dimension of argument 0 could be cut; leave "
            "'one', 'batch' or 'permuted' among the relations, or give more rows."
        )


def comparable(
    subject: KernelSubject, runs: list[KernelRun], report: CheckReport
) -> list[KernelRun]:
    """Leave out inputs for which the reference itself depends on the width of its numbers."""
    comparable_runs = []
    for run in runs:
        if not subject.depends_on_dtype(run.arguments, dict.fromkeys(subject.slots, 0)):
            comparable_runs.append(run)
            continue
        reason = "the reference differs between float32 and float64 by more than float noise"
        if run.name == EXAMPLE:
            raise ValueError(
                f"{reason} for the example; give a like= whose constants do not depend on the "
                "dtype (an eps?), or an example of smaller values."
            )
        report.left_out[run.name] = reason
    return comparable_runs
