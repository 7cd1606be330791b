"""Runs of a kernel: at the example, at derived inputs, and at other shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qgate.device_errors import LostDeviceError, lost_device
from qgate.expected.derived import DerivedInput
from qgate.expected.narrow_floats import is_wide_float
from qgate.expected.noise import Expected
from qgate.kernel_checks.declared import Quantization
from qgate.kernel_checks.input_facts import ReferenceResult
from qgate.kernel_checks.record import CheckFailure, CheckReport
from qgate.kernel_checks.subject import (
    RESULT,
    Choices,
    KernelRefusal,
    KernelSubject,
    UnusableResult,
)
from qgate.kernel_checks.watching import HUNG

EXAMPLE = "the example"
NOISE = 2.0**-16
"""Share of a typical value of the example up to which a result of zero may be another number."""
_MAKING_TIES = ("batch", "long", "zero rows", "small")
_NUDGE = 2.0**-30
_JUMP = 2.0**-12
"""Share of a result's RMS by which rounding moves no function that a kernel can be held to."""
REFUSED = "the kernel refused"
"""Words with which a reason begins where a kernel raised an exception."""


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
    source: DerivedInput | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "subject", self.subject.under(self.choices))

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
    for quantization in _of_magnitude(subject, variant):
        if not quantization.follows_magnitude:
            reason = f"{quantization.name} has no scale made from the values"
            report.left_out[variant.name] = reason
            return None
    if variant.name in HUNG.get():
        report.left_out[variant.name] = HUNG.get()[variant.name]
        return None
    try:
        shape = _shape_of_reference(subject, variant.arguments)
    except Exception as error:
        if lost_device(error):
            raise
        report.left_out[variant.name] = f"the reference refused: {error_words(error)}"
        return None
    try:
        return run_kernel(subject, variant.arguments, shape, variant.name, report, variant)
    except (CheckFailure, LostDeviceError):
        raise
    except _OtherLengthError as error:
        words = str(error)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, KernelRefusal) else None
        words = error_words(cause or error)
    report.left_out[variant.name] = f"{REFUSED}: {words}"
    return None


class _OtherLengthError(Exception):
    """The length of a result is that of an argument which was not cut, and has to be as long."""


def _giver_of_length(variant: DerivedInput, actual: torch.Size, shape: torch.Size) -> int | None:
    """Return the argument whose length a result has where only a like one of another was cut.

    Attention that makes its result like Q takes for granted that V is as wide. Rows of argument 0
    have to be counted.
    """
    axis = None if variant.cut is None else variant.cut[0]
    if axis is None or axis.output is None or axis.cuts_rows:
        return None
    if actual != torch.Size([*shape[: axis.output], axis.length, *shape[axis.output + 1 :]]):
        return None
    for position, value in enumerate(variant.arguments):
        for of, dim in axis.dimensions:
            is_like = isinstance(value, Tensor) and value.dim() == variant.arguments[of].dim()
            if is_like and position != of and value.shape[dim] == axis.length:
                return position
    return None


def tried_run(
    subject: KernelSubject, example: list[Any], variant: DerivedInput, report: CheckReport
) -> KernelRun | None:
    """Run a derived input of an example; None where it is refused, which is listed."""
    actual = try_input(subject, variant, report)
    if actual is None:
        return None
    subject.derive_from(example, variant, actual)
    return KernelRun(variant.name, variant.arguments, actual, variant)


def _of_magnitude(subject: KernelSubject, variant: DerivedInput) -> Iterator[Quantization]:
    """List the formats whose scales have to follow the values of an input."""
    if variant.relation in ("large", "small"):
        yield from subject.slots.values()
    elif variant.raised is not None:
        yield from (subject.slots[p] for p in (variant.raised[0], RESULT) if p in subject.slots)


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


def error_words(error: BaseException) -> str:
    """Return an exception as its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:100]}" if lines else type(error).__name__


def run_kernel(
    subject: KernelSubject,
    arguments: list[Any],
    shape: torch.Size,
    name: str,
    report: CheckReport,
    variant: DerivedInput | None = None,
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
        words = error_words(error)
        raise CheckFailure(
            f"{subject.name} raised {type(error).__name__} for {name}"
            + words.removeprefix(type(error).__name__),
            report,
        ) from error
    except ReferenceResult:
        raise CheckFailure(
            f"{subject.name} returns a result of the reference for {name}, not one of its own",
            report,
            "it lies in memory that the reference wrote: do both use one buffer?",
        ) from None
    except UnusableResult as error:
        if error.kind == "NoneType":
            raise CheckFailure(
                f"{subject.name} returns nothing (None) for {name}, right is {shape_words(shape)}",
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
        giver = None if variant is None else _giver_of_length(variant, actual.shape, shape)
        if giver is not None:
            raise _OtherLengthError(f"it takes this length from argument {giver}")
        raise CheckFailure(
            f"{subject.name} returns {shape_words(actual.shape)} for {name}, right is "
            f"{shape_words(shape)}",
            report,
        )
    _check_changes(subject, name, report)
    return actual


def shape_words(shape: torch.Size) -> str:
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


def comparable(
    subject: KernelSubject, runs: list[KernelRun], report: CheckReport
) -> list[KernelRun]:
    """Leave out inputs for which the reference itself depends on the width of its numbers."""
    whole = subject.values(runs[0].arguments, dict.fromkeys(subject.slots, 0))
    size = float(whole.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())
    comparable_runs = []
    for run in runs:
        if _cancels(subject, run, size):
            report.left_out[run.name] = "the expected result is zero, the kernel's is float noise"
            continue
        if _jumps(subject, run):
            report.left_out[run.name] = "the reference divides by zero or chooses at a tie there"
            continue
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


def _jumps(subject: KernelSubject, run: KernelRun) -> bool:
    """Tell if the reference gives something else for numbers next to its arguments.

    Zeros, small numbers and repeated entries make ties, at which routers choose as they see fit.
    What a later argument makes infinite says nothing; a kernel's own NaN is no choice.
    """
    source = run.source
    if source is None or source.relation not in _MAKING_TIES or _cuts_rows(source):
        return False
    generator, nudged = torch.Generator().manual_seed(0), [*run.arguments]
    for position, value in enumerate(run.arguments):
        if is_wide_float(value) and value.numel():
            x = value.double()
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
            nudged[position] = x + noise * _NUDGE * (x.abs() + x.square().mean().sqrt() + _NUDGE)
    here, beside = subject.unquantized(run.arguments), subject.unquantized(nudged)
    if not bool(here.isfinite().all()):
        return not source.name.endswith("(argument 0)")
    if not (here.numel() and bool(run.actual.double().isfinite().all())):
        return False
    allowed = _JUMP * float(here.square().mean().sqrt())
    return not bool(((here - beside).abs() <= allowed).all())


def _cuts_rows(source: DerivedInput) -> bool:
    return source.cut is not None and source.cut[0].cuts_rows


def _cancels(subject: KernelSubject, run: KernelRun, size: float) -> bool:
    """Tell if all of a result cancels to zero, and the kernel's but for noise of the example's."""
    largest = float(run.actual.double().abs().max()) if run.actual.numel() else 0.0
    if run.name == EXAMPLE or not 0 < largest <= NOISE * size:
        return False
    return not bool(subject.values(run.arguments, dict.fromkeys(subject.slots, 0)).any())
