"""Runs beyond the example: longer than any tile, and again in memory that holds other values."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qgate.expected.derived import CutAxis, DerivedInput
from qgate.expected.longer import LongInput, long_inputs
from qgate.expected.narrow_floats import same_bits, size_of
from qgate.expected.noise import evaluate
from qgate.kernel_checks.fitting import Judgement
from qgate.kernel_checks.inputs import decoded, step_of
from qgate.kernel_checks.record import OVER_BUDGET, CheckFailure, CheckReport
from qgate.kernel_checks.runs import REFUSED, Failing, KernelRun, error_words, tried_run
from qgate.kernel_checks.subject import KernelRefusal, KernelSubject
from qgate.text import counted

EVALUATIONS = 12
"""Times that the reference runs to judge one input: its noise, and roundings of its operators."""
TIMED = 3
"""Calls of the reference that are timed; the fastest counts, as others may have waited."""
AGAIN = "other values in the same memory"


def longer_runs(
    subject: KernelSubject,
    example: list[Any],
    axes: Sequence[CutAxis],
    budget_s: float,
    seed: int,
    report: CheckReport,
) -> list[KernelRun]:
    """Run inputs that are longer than a tile, one dimension at a time, as far as seconds allow."""
    values = decoded(example)
    seconds_each = min(_seconds_of(subject, values) for _ in range(TIMED))
    pace = min(subject.paces) + EVALUATIONS * seconds_each / max(size_of(values), 1)
    seconds, runs = budget_s, []
    listed = long_inputs(subject.like, values, axes, step_of(subject))
    for number, long in enumerate(listed):
        share = seconds / (len(listed) - number)
        variant = _affordable(long, values, pace, share, seed, report)
        if variant is None:
            continue
        seconds -= pace * size_of(variant.arguments)
        if run := tried_run(subject, example, variant, report):
            runs.append(run)
    return runs


def _seconds_of(subject: KernelSubject, values: list[Any]) -> float:
    """Return the seconds of one call of the reference."""
    began = time.perf_counter()
    evaluate(subject.like, values)
    return time.perf_counter() - began


def _affordable(
    long: LongInput, values: list[Any], pace: float, seconds: float, seed: int, report: CheckReport
) -> DerivedInput | None:
    """Return the longest input that the seconds left allow; list what they do not."""
    for length in long.lengths:
        variant = long.of(values, length, seed)
        cost = pace * size_of(variant.arguments)
        if cost <= seconds:
            return variant
        report.left_out[variant.name] = f"{OVER_BUDGET}: about {cost:.2g} s, {seconds:.2g} are left"
    return None


def reused_memory(
    subject: KernelSubject,
    example: list[Any],
    axes: Sequence[CutAxis],
    seed: int,
    report: CheckReport,
) -> KernelRun | None:
    """Call the kernel with other values in the memory that it got the example in.

    What is packed lies in other memory in each call.
    """
    if subject.pack or any(q.is_packed for q in subject.inputs.values()):
        return None
    if any(isinstance(value, Tensor) and is_expanded(value) for value in example):
        report.left_out[AGAIN] = "an argument is expanded: its memory cannot be written"
        return None
    reordered = _others(example, axes, seed)
    if reordered is None:
        return None
    try:
        actual = call_with(subject, example, reordered)
    except KernelRefusal as refusal:
        report.left_out[AGAIN] = f"{REFUSED}: {error_words(refusal.__cause__ or refusal)}"
        return None
    return KernelRun(AGAIN, reordered, actual)


def call_with(subject: KernelSubject, memory: list[Any], values: list[Any]) -> Tensor:
    """Call the kernel with values in the memory of other arguments, which get theirs back."""
    pairs = [(m, v) for m, v in zip(memory, values, strict=True) if isinstance(m, Tensor)]
    before = [tensor.clone() for tensor, _ in pairs]
    try:
        for tensor, value in pairs:
            tensor.copy_(value)
        return subject.run(memory, AGAIN)
    finally:
        for (tensor, _), old in zip(pairs, before, strict=True):
            tensor.copy_(old)


def check_fifth_call(
    example: KernelRun, again: KernelRun, judgement: Judgement, report: CheckReport
) -> None:
    """Call the kernel once more with other values in the memory of the calls before."""
    try:
        actual = call_with(judgement.subject, example.arguments, again.arguments)
    except KernelRefusal as refusal:
        raise CheckFailure(
            f"{report.name} raised {error_words(refusal.__cause__ or refusal)} in a later call "
            f"with {AGAIN}",
            report,
        ) from refusal.__cause__
    later = replace(again, actual=actual)
    if judgement.explains(later):
        return
    expected = judgement.expected(again)
    wrong = expected.outside(actual)
    failing = Failing(
        judgement.subject, judgement.choices, AGAIN, again.arguments, actual, expected, wrong
    )
    raise stale_failure(failing, example, report) or CheckFailure(
        f"{report.name} gives other values in the fifth call than in the second, with the same "
        f"values in the same memory: {int(wrong.sum()):,} of {wrong.numel():,} are wrong",
        report,
    )


def stale_failure(failing: Failing, example: KernelRun, report: CheckReport) -> CheckFailure | None:
    """Say that a kernel uses what it made of the values that lay in the memory before."""
    subject, before = failing.subject, example.arguments
    hint = "it keeps what it made of them by their address: a cache, or a graph of an earlier call"
    if same_bits(failing.actual, example.actual):
        return CheckFailure(
            f"{report.name} gives its earlier result where {AGAIN} are given", report, hint
        )
    for position, value in enumerate(failing.arguments):
        if not isinstance(value, Tensor):
            continue
        mixed = list(failing.arguments)
        mixed[position] = before[position]
        if subject.expected(mixed, failing.choices).explains(failing.actual):
            return CheckFailure(
                f"{report.name} uses earlier values of argument {position} where {AGAIN} are given",
                report,
                hint,
            )
    return None


def is_expanded(value: Tensor) -> bool:
    """Tell if one place in memory is several elements of a tensor."""
    if value.layout != torch.strided:
        return False
    layout = zip(value.stride(), value.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in layout)


def own_memory(value: Any) -> Any:
    """Return a tensor with the same layout in memory of its own, which may be written."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
        return value
    if not value.numel() or is_expanded(value):
        return value
    own = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return own.copy_(value)


def _others(arguments: list[Any], axes: Sequence[CutAxis], seed: int) -> list[Any] | None:
    """Return the same numbers in another order, along all axes that have no order of their own."""
    generator = torch.Generator().manual_seed(seed)
    reordered = list(arguments)
    for axis in axes:
        if not axis.is_causal and not axis.positions_in:
            reordered = axis.take(reordered, torch.randperm(axis.length, generator=generator))
    pairs = zip(arguments, reordered, strict=True)
    changed = any(isinstance(a, Tensor) and not same_bits(a, b) for a, b in pairs)
    return reordered if changed else None


def note_sizes(runs: Sequence[KernelRun], report: CheckReport) -> None:
    """Record the largest size that was tried along each dimension, and where all were the same."""
    for position, value in enumerate(decoded(runs[0].arguments)):
        if not isinstance(value, Tensor) or not value.dim():
            continue
        sides = (run.arguments[position] for run in runs)
        shapes = [side.shape for side in sides if isinstance(side, Tensor)] or [value.shape]
        same_rank = [shape for shape in shapes if len(shape) == value.dim()]
        by_dim = list(zip(*same_rank, strict=True))
        report.largest[f"argument {position}"] = [max(sizes) for sizes in by_dim]
        report.unvaried += [
            f"dimension {dim} of argument {position}"
            for dim, sizes in enumerate(by_dim)
            if len({*sizes}) == 1
        ]


def note_spread(subject: KernelSubject, runs: Sequence[KernelRun], report: CheckReport) -> None:
    """Say that a NaN or Inf spreads further than in the reference, to what may depend on it."""
    for run in runs if not subject.slots else ():
        if run.source is not None and run.source.relation == "nan":
            spread = ~run.actual.double().isfinite() & subject.unquantized(run.arguments).isfinite()
            count = int(spread.sum())
            if count:
                report.notes.append(
                    f"{run.name} makes {counted(count, 'value')} NaN or Inf that the reference "
                    "keeps finite: what is masked is multiplied by 0"
                )
