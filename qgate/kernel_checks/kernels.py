"""The check of a kernel: expected results, relations on derived inputs, repeatability."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgate.errors import first_line, unknown
from qgate.expected.conventions import MSE
from qgate.expected.derived import RELATIONS
from qgate.expected.distances import relative_error
from qgate.expected.narrow_floats import is_wide_float
from qgate.expected.searched_scales import search_allowance, searched_error
from qgate.expected.value_steps import value_steps
from qgate.kernel_checks.accepted import hold_accepted
from qgate.kernel_checks.beyond import (
    AGAIN,
    check_fifth_call,
    longer_runs,
    note_sizes,
    note_spread,
    own_memory,
    reused_memory,
    stale_failure,
)
from qgate.kernel_checks.casts import WORTH_A_SEARCH
from qgate.kernel_checks.declared import by_position, declare, to_array
from qgate.kernel_checks.declaring import make_subject
from qgate.kernel_checks.diagnosis import explain
from qgate.kernel_checks.drawn import check_drawn
from qgate.kernel_checks.fitting import Judgement, judge
from qgate.kernel_checks.gradients import check_gradients
from qgate.kernel_checks.inputs import RISKY, axes_of, derived_inputs
from qgate.kernel_checks.power import FAIL, PASS, hold_power, hold_structure, measure_power
from qgate.kernel_checks.record import CheckFailure, CheckReport
from qgate.kernel_checks.references import hold_reference, settle_reference
from qgate.kernel_checks.repeats import check_invariance, check_repeats, check_steadiness
from qgate.kernel_checks.requests import KernelRequest, request_of
from qgate.kernel_checks.runs import (
    EXAMPLE,
    KernelRun,
    comparable,
    note_refusals,
    run_kernel,
    tried_run,
)
from qgate.kernel_checks.settling import unexplained
from qgate.kernel_checks.stochastic import (
    check_stochastic,
    is_stochastic,
    nearest_twin,
    of_effect,
)
from qgate.kernel_checks.subject import (
    RESULT,
    Choices,
    KernelSubject,
)
from qgate.tensor_inputs import argument_tensor, flushes_denormals


def check_kernel(
    kernel: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    like: Callable[..., Any],
    inputs: Mapping[int, Any] | Sequence[Any] | None = None,
    output: Any = None,
    convention: str | None = None,
    pack: dict[int, Callable[..., Any]] | None = None,
    unpack: Callable[..., Any] | None = None,
    shapes: Sequence[Sequence[tuple[int, ...]]] = (),
    relations: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    arithmetic: str = "float32",
    intermediates: str = "rounded",
    invariant: bool = False,
    repeatable: bool = False,
    limit: float | None = None,
    accept: Path | None = None,
    inconclusive: str = FAIL,
    budget_s: float = 2.0,
    backward: Any = False,
    seed: int = 0,
) -> CheckReport:
    """Hold a kernel at what ideally quantized arguments give; CheckFailure says the cause."""
    coarse, request = request_of(arithmetic, intermediates)
    check_place(dtype, device)
    if isinstance(budget_s, bool) or not isinstance(budget_s, int | float) or not budget_s >= 0:
        raise ValueError(f"budget_s {budget_s!r} is not allowed; give seconds, 0 or more.")
    if not isinstance(backward, bool):
        declare(nearest_twin(backward), "backward", torch.float32)
    _check_surroundings(arguments)
    example = [own_memory(_moved(argument, dtype, device)) for argument in arguments]
    declared: dict[Any, Any] = {**by_position(inputs, example)}
    declared |= {} if output is None else {RESULT: output}
    at_random = {slot: q for slot, q in declared.items() if is_stochastic(q)}
    subject = make_subject(
        kernel,
        example,
        like=like,
        inputs={slot: nearest_twin(q) for slot, q in declared.items() if slot != RESULT},
        output=nearest_twin(output),
        pack=pack,
        unpack=unpack,
        arithmetic=coarse,
        convention=convention,
    )
    chosen = _checked_relations(relations)
    if inconclusive not in (FAIL, PASS):
        raise ValueError(str(unknown("value of inconclusive", inconclusive, (FAIL, PASS))))
    report = CheckReport(subject.name, seed=seed)
    subject, exact = settle_reference(subject, example, convention)
    _check_example(exact, subject)
    choices: Choices = dict.fromkeys(subject.slots, 0)
    ideal = subject.values(example, choices)
    report.format_error = relative_error(ideal, exact)
    _check_limit(limit, report.format_error)
    run = KernelRun(EXAMPLE, example, run_kernel(subject, example, exact.shape, EXAMPLE, report))
    report.error = relative_error(run.actual, exact)
    if invariant and (at_random or convention == MSE):
        of = "rounding at random" if at_random else "convention 'mse'"
        raise ValueError(
            f"invariant=True needs derived inputs, which {of} has none of; check the kernel at "
            "fixed scales with rounding to the nearest, or leave one of the two out."
        )
    if any(q.is_named for q in at_random.values()):
        check_drawn(subject, example, run.actual, at_random, report)
    elif at_random := of_effect(subject, example, at_random):
        check_stochastic(subject, example, at_random, seed, report)
    elif convention == MSE:
        _check_searched(subject, run, report)
    else:
        axes = axes_of(subject, example, report)
        derived = derived_inputs(subject, example, axes, chosen, shapes, seed)
        tried = functools.partial(tried_run, subject, example, report=report)
        usual = (tried(variant) for variant in derived if variant.relation not in RISKY)
        runs = [run, *filter(None, usual)]
        if "again" in chosen and (later := reused_memory(subject, example, axes, seed, report)):
            runs.append(later)
        if "long" in chosen:
            runs += longer_runs(subject, example, axes, budget_s, seed, report)
        runs += filter(None, (tried(variant) for variant in derived if variant.relation in RISKY))
        same_bits = repeatable or invariant
        runs = _check_exactly(subject, runs, request, inconclusive, report, same_bits)
        if invariant:
            check_invariance(subject, run, runs, report)
        note_refusals(derived, report)
    hold_reference(subject, example)
    if backward is not False:
        options = {
            "inputs": inputs, "convention": convention, "relations": relations,
            "arithmetic": arithmetic, "intermediates": intermediates, "repeatable": repeatable,
            "inconclusive": inconclusive, "budget_s": budget_s, "seed": seed,
        }  # fmt: skip
        check_gradients(check_kernel, subject, example, run.actual, backward, options, report)
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
    return str(slot) if isinstance(slot, str) else f"argument {slot}"


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


def check_place(dtype: Any, device: Any) -> None:
    """Refuse a dtype or a device that no argument can be moved to."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}; give a torch.dtype, such as torch.bfloat16.")
    if device is None:
        return
    try:
        kind = torch.empty(0, device=device).device.type
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device {device!r} cannot be used: {first_line(error)}") from None
    if kind == "meta":
        raise ValueError("device 'meta' has no values to check; give 'cpu' or a GPU.")


def _check_surroundings(arguments: Sequence[Any]) -> None:
    """Refuse arguments without values, and settings of torch that change the reference."""
    for position, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            argument_tensor(argument, "check a kernel with", f"argument {position}: ")
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise ValueError(
            "torch.autocast is on, which computes the reference in 16 bits: call check_kernel "
            "outside of it, and enter it inside of the kernel if the kernel needs it."
        )
    if flushes_denormals():
        raise ValueError(
            "torch.set_flush_denormal(True) is set, which makes zeros of the reference's smallest "
            "values: set it to False around the check, and to True inside of the kernel if it "
            "needs it."
        )


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
    subject: KernelSubject,
    runs: list[KernelRun],
    request: KernelRequest,
    inconclusive: str,
    report: CheckReport,
    same_bits: bool,
) -> list[KernelRun]:
    """Hold the example and derived inputs within float noise of one convention; return all runs."""
    run = runs[0]
    runs = comparable(subject, runs, report)
    judgement = judge(subject, runs, request)
    report.conventions = {
        _slot_name(slot): quantization.choices[judgement.choices[slot]].name
        for slot, quantization in subject.slots.items()
    }
    if request.asks and not judgement.failing and judgement.accounted is None:
        _check_request(judge(subject, runs, KernelRequest()), request, report)
    if judgement.failing:
        hold_reference(subject, run.arguments)
        for failing in judgement.failing if judgement.failing[0].name != EXAMPLE else ():
            if failing.name == AGAIN and (failure := stale_failure(failing, run, report)):
                raise failure
        check_steadiness(judgement.failing[0], report)
        if request.restricts:
            _check_request(judge(subject, runs, KernelRequest()), request, report)
        raise explain(unexplained(judgement), len(runs), report)
    if judgement.accounted is not None:
        report.conventions["arithmetic"] = judgement.accounted.words()
        if not judgement.accounted.is_exact:
            report.notes.append(judgement.accounted.cost_words())
    check_repeats(subject, runs[0], report, None if same_bits else judgement.explains)
    for later in runs:
        if later.name == AGAIN:
            check_fifth_call(run, later, judgement, report)
    listed = hold_structure(subject, runs, judgement, report)
    measure_power(subject, runs[0], judgement, listed, report)
    hold_power(report, listed, inconclusive)
    report.held = [each.name for each in runs]
    note_spread(subject, runs, report)
    note_sizes(runs, report)
    _measure_kappa(subject, runs, judgement, report)
    return runs


def _measure_kappa(
    subject: KernelSubject, runs: list[KernelRun], judgement: Judgement, report: CheckReport
) -> None:
    """Measure the κ of a result that is cast without a scale, at all inputs that are compared."""
    q = None if subject.output is None else subject.output.quantizer
    if q is None or q.granularity is not None or q.format.kind != "element":
        return
    steps = 0
    for run in runs:
        defined = to_array(subject.values(run.arguments, judgement.choices))
        actual = to_array(run.actual)
        finite = np.isfinite(actual) & np.isfinite(defined)
        of_run = value_steps(actual[finite], defined[finite], q.format)
        steps = max(steps, int(of_run.max(initial=0)))
    report.kappa = steps


def _check_request(free: Judgement, request: KernelRequest, report: CheckReport) -> None:
    """Say of a kernel that is right otherwise what it follows instead of what was asked for."""
    if free.failing:
        return
    words = free.accounted.words() if free.accounted else "exact sums within float noise"
    if request.arithmetic is not None:
        wanted_words = f"{request.arithmetic.name!r} ({request.arithmetic.words})"
        raise CheckFailure(
            f"{report.name} does not follow {wanted_words}: it follows {words}",
            report,
        )
    raise CheckFailure(
        f"{report.name} is wrong: intermediates='float32' forbids {words}",
        report,
        *([free.accounted.cost_words()] if free.accounted else []),
    )


def _check_searched(subject: KernelSubject, run: KernelRun, report: CheckReport) -> None:
    """Hold the error of a kernel with searched scales in a band around that of our own search."""
    ideal_error, allowance = report.format_error, 1.0
    shares = []
    for position, quantization in subject.inputs.items():
        if quantization.quantizer is None:
            raise ValueError(f"convention 'mse' needs a format, not {quantization.name}.")
        x = run.arguments[position].double()
        best = searched_error(to_array(x), quantization.quantizer)
        mine = relative_error(quantization.ideal(x), x)
        shares.append(best / mine if mine else 1.0)
        allowance = max(allowance, search_allowance(quantization.quantizer))
    best_error = ideal_error * (sum(shares) / len(shares) if shares else 1.0)
    low, high = 0.7 * best_error, 1.15 * allowance * max(best_error, ideal_error)
    report.conventions = {
        _slot_name(slot): "searched scales, held by their error alone" for slot in subject.inputs
    }
    if report.error > WORTH_A_SEARCH * best_error:
        judgement = judge(subject, [run], KernelRequest())
        choices = judgement.choices
        if not judgement.failing:
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
