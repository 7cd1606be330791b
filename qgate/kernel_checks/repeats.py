"""Further runs of one input: the same bits or float noise, and the same for rows that were cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qgate.expected.derived import are_independent
from qgate.expected.intermediates import HALVES
from qgate.expected.narrow_floats import same_bits
from qgate.expected.noise import REPETITIONS
from qgate.kernel_checks.record import CheckFailure, CheckReport
from qgate.kernel_checks.references import with_seed
from qgate.kernel_checks.runs import Failing, KernelRun, error_words, shape_words
from qgate.kernel_checks.subject import KernelRefusal, KernelSubject

STEADY = 2.0
"""Widths of float noise up to which a second run of a wrong kernel says nothing about the cause."""


def check_repeats(
    subject: KernelSubject,
    run: KernelRun,
    report: CheckReport,
    explains: Callable[[KernelRun], bool] | None = None,
) -> None:
    """Run the same input twice more; other bits that are explained as the first are a note.

    explains   tells if further results are right; None: they must have the same bits
    """
    for number in range(2, REPETITIONS + 1):
        try:
            repeated = subject.run(run.arguments, f"{run.name}, run {number}")
        except KernelRefusal as refusal:
            error = refusal.__cause__ or refusal
            raise CheckFailure(
                f"{subject.name} raised {type(error).__name__} in run {number} of the same input",
                report,
                error_words(error),
            ) from error
        if repeated.shape != run.actual.shape:
            raise CheckFailure(
                f"{subject.name} is not repeatable: run {number} of the same input returns "
                f"{shape_words(repeated.shape)}, the first {shape_words(run.actual.shape)}",
                report,
            )
        same = (repeated == run.actual) | (repeated.isnan() & run.actual.isnan())
        if bool(same.all()):
            continue
        if explains is None or not explains(replace(run, actual=repeated)):
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
        different = change > STEADY * (failing.expected.width + _flip(failing))
        if bool(different.any()):
            raise _not_repeatable(subject, failing.arguments, different, 2, report)


def _flip(failing: Failing) -> Tensor | float:
    """Return how far values move when noise makes a rounding to 16 bits inside fall otherwise."""
    tensors = [failing.actual, *(x for x in failing.arguments if isinstance(x, Tensor))]
    step = max((torch.finfo(t.dtype).eps for t in tensors if t.dtype in HALVES), default=0.0)
    values = failing.expected.values.nan_to_num(0.0, 0.0, 0.0)
    return step * (values.abs() + values.square().mean().sqrt())


def _not_repeatable(
    subject: KernelSubject, arguments: list[Any], different: Tensor, run: int, report: CheckReport
) -> CheckFailure:
    seeded: list[Tensor] = []
    steady: list[Tensor] = []
    with contextlib.suppress(KernelRefusal):
        steady = [subject.run(arguments) for _ in range(2)]
    with contextlib.suppress(KernelRefusal):
        seeded = [with_seed(lambda: subject.run(arguments), arguments) for _ in range(2)]
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
