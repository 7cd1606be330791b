"""Why a kernel failed: the fault that explains its result, then where and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgate.causes.codes import CODE_BITS, find_table
from qgate.causes.outputs import (
    describe_cut,
    describe_moved,
    describe_parts,
    describe_places,
    describe_ruin,
    describe_whole,
    scattered,
)
from qgate.causes.places import axis_word, factor_words, place_words
from qgate.causes.terms import find_range_fault, find_term_fault, find_term_weights
from qgate.expected.derived import CutAxis, find_axes
from qgate.expected.noise import ARITHMETICS, Expected, evaluate, longest_dimension
from qgate.expected.products import Product, find_product
from qgate.formats import Encoded
from qgate.kernel_checks.declarations import describe_declaration
from qgate.kernel_checks.declared import element_scales
from qgate.kernel_checks.dependence import describe_dependence
from qgate.kernel_checks.explanations import (
    describe_scaled_argument,
    describe_wrong_cast,
    describe_wrong_reading,
)
from qgate.kernel_checks.grouped import describe_groups, grouped_product
from qgate.kernel_checks.integer_sums import describe_integer_sums
from qgate.kernel_checks.nearest import describe_under_roundings
from qgate.kernel_checks.operator_gains import describe_operator_gain
from qgate.kernel_checks.power import find_structure
from qgate.kernel_checks.record import CheckFailure, CheckReport, WorstValue
from qgate.kernel_checks.runs import EXAMPLE, Failing, KernelRun
from qgate.kernel_checks.scale_factors import describe_scale_factor
from qgate.kernel_checks.settling import beside_arithmetic, narrowed, settled
from qgate.kernel_checks.stage_faults import describe_wrong_stage
from qgate.kernel_checks.variations import describe_operator_before_cast, describe_variation
from qgate.models.refusals import LENGTH_REFUSALS
from qgate.text.wording import counted

UNEXPLAINED = 0.02
"""The share of a residual's energy that may be left when lost terms are called the cause."""
NO_WEIGHT = 1e-4
"""Share of the largest weight of a term below which a term is called lost."""
LEAST_GAIN, CLEAR = 0.005, 6.0
"""Excess of a factor that no rounding leaves, and times its noise that it is to be."""
MEAN = "the mean "
"""How faults of what is subtracted before a stage begin."""
STEEPER = 2.0
"""Times that noise may grow more than the roundings that make it, as of a smooth function."""
WEAKEST_NOISE = 0.1
"""RMS error of a coarser arithmetic, in units of the effect of one rounding of every input."""

LOST = 0.1
"""Share of what an entry should change up to which it is called lost."""
MOST_NAMED = 3

FEWEST = 3
"""Wrong rows that must be explained, or all of them."""


def explain(failing: Sequence[Failing], count: int, report: CheckReport) -> CheckFailure:
    """Return the failure of a kernel, with its cause in the first line."""
    case = settled(_plainest(failing))
    cause = describe_uncounted(failing) or diagnose(case)
    where = "" if case.name == EXAMPLE else f" for {case.name}"
    worst = _worst(case)
    details = [_worst_words(worst), _size(case)]
    if len(failing) > 1:
        also = [*dict.fromkeys(other.name for other in failing if other.name != case.name)]
        more = f" and {len(also) - 3} more" if len(also) > 3 else ""
        agree = count - len(failing)
        details.append(
            f"also wrong for {'; '.join(also[:3])}{more}; right for {counted(agree, 'other input')}"
        )
    elif count > 1:
        details.append(f"right for {counted(count - 1, 'other input')}")
    details += [
        f"nearest convention of {position}: {quantization.choices[choice].name}"
        for position, quantization, choice in zip(
            report.conventions, case.subject.slots.values(), case.choices.values(), strict=True
        )
        if choice
    ]
    first = f"{case.subject.name} is wrong{where}: {cause}"
    return CheckFailure(first, report, *details, input=case.name, worst=worst)


def _plainest(failing: Sequence[Failing]) -> Failing:
    """Return the example, or else the smallest derived input that is wrong in part only."""
    if failing[0].name == EXAMPLE:
        return failing[0]
    partly = [case for case in failing if not bool(case.wrong.all())]
    return min(partly or failing, key=lambda case: case.wrong.numel())


def _worst(case: Failing) -> WorstValue:
    low, high = case.expected.bounds(case.actual.dtype)
    beyond = torch.maximum(low - case.actual.double(), case.actual.double() - high)
    beyond = torch.where(case.wrong, beyond.nan_to_num(torch.inf, torch.inf, torch.inf), -torch.inf)
    flat = int(beyond.argmax()) if beyond.dim() else 0
    index = [int(i) for i in np.unravel_index(flat, case.actual.shape)]
    actual, value, least, most = (
        float(tensor.reshape(-1)[flat]) for tensor in (case.actual, case.expected.values, low, high)
    )
    value = min(max(value, least), most)  # as the result's dtype rounds it
    return WorstValue(index, actual, value, least, most)


def _worst_words(worst: WorstValue) -> str:
    return (
        f"worst at [{', '.join(map(str, worst.index))}]: {worst.actual:.6g}, expected "
        f"{worst.expected:.6g} (float noise allows {worst.least:.6g} to {worst.most:.6g})"
    )


def _size(case: Failing) -> str:
    energy = float(case.expected.values.nan_to_num(0.0, 0.0, 0.0).square().mean())
    share = (float(case.residual.square().mean()) / energy) ** 0.5 if energy else 0.0
    return (
        f"{int(case.wrong.sum()):,} of {case.wrong.numel():,} values are outside float noise; RMS "
        f"error {share:.3g} of the expected RMS"
    )


def diagnose(case: Failing) -> str:
    """Say what is wrong with one result in a few words."""
    words = describe_ruin(case.actual, case.expected, case.wrong)
    if words:
        if bool(case.actual.isfinite().any()) and not bool(case.actual.isfinite().all()):
            some = narrowed(case)
            return describe_integer_sums(some) or describe_variation(some, []) or words
        return words
    words = _wrong_groups(case) or _lost_term(case) or _wrong_values(case)
    words = words or _term_weights(case) or _lost_entry(case)
    if words:
        return words
    exact = case
    case, fits = beside_arithmetic(case)
    words = _structure(case) or describe_under_roundings(fits)
    words = words or describe_whole(case.actual, case.expected, case.wrong)
    words = words or describe_wrong_reading(narrowed(exact))
    words = words or describe_operator_gain(narrowed(exact))
    words = words or describe_scaled_argument(narrowed(exact))
    words = words or describe_parts(case.actual, case.expected, case.wrong)
    if words:
        return words
    places = describe_places(case.actual, case.expected, case.wrong)
    if places.endswith("zero"):
        return places
    words = describe_cut(case.actual, case.expected, case.wrong)
    if words:
        return words
    words = _cast_under_definition(exact)
    if words:
        return words
    # Coarse sums would show at the example, too.
    words = "" if places or case.name != EXAMPLE else _coarse_arithmetic(case)
    words = words or describe_dependence(case)
    return ": ".join(part for part in (places, words) if part) or scattered(case.wrong)


def _wrong_values(case: Failing) -> str:
    """Name what arguments or operators are computed otherwise than the reference's."""
    some = narrowed(case)
    words = describe_declaration(some) or describe_operator_before_cast(some)
    if words:
        return words
    # A mean over other dimensions may do what an argument without its mean does.
    if (words := describe_wrong_stage(some)).startswith(MEAN):
        return words
    words, casts = describe_wrong_cast(some)
    words = words or describe_integer_sums(some)
    words = words or describe_wrong_stage(some)
    words = words or describe_moved(case.actual, case.expected, case.wrong)
    words = words or describe_scale_factor(some)
    words = words or describe_variation(some, casts) or _wrong_codes(some)
    return words or describe_restart(case)


def _cast_under_definition(case: Failing) -> str:
    """Name a faulty cast beside the definition, where the fault makes other conventions nearer."""
    definition = dict.fromkeys(case.subject.slots, 0)
    if case.choices == definition:
        return ""
    expected = case.subject.expected(case.arguments, definition)
    wrong = expected.outside(case.actual)
    plain = replace(case, choices=definition, expected=expected, wrong=wrong)
    return describe_wrong_cast(narrowed(plain))[0]


def _structure(case: Failing, arithmetic: str | None = None) -> str:
    """Name what coarse sums do not explain of all values together."""
    run = KernelRun(case.name, case.arguments, case.actual)
    return find_structure(case.subject, run, case.choices, arithmetic)[1]


def _wrong_groups(case: Failing) -> str:
    """Name the groups of a grouped product that are wrong."""
    if case.subject.like is not grouped_product or case.subject.output:
        return ""
    x, w, ends = case.ideal
    return describe_groups(x, w, ends, case.actual, case.expected, case.wrong)


def _wrong_codes(case: Failing) -> str:
    """Name codes of a narrow format that an argument's result is explained by decoding wrongly."""
    subject, ideal = case.subject, case.ideal
    if subject.output:
        return ""
    for position, quantization in subject.inputs.items():
        if quantization.quantizer is None or quantization.quantizer.format.element.bits > CODE_BITS:
            continue
        argument = case.arguments[position]
        encoded = argument if isinstance(argument, Encoded) else quantization.pack(argument)

        def like(values: Tensor, position: int = position) -> Tensor:
            return evaluate(subject.like, [*ideal[:position], values, *ideal[position + 1 :]])

        table = find_table(like, ideal[position], element_scales(encoded), case.actual)
        if table is None:
            continue
        room = case.expected.width * max(1.0, table.largest_change)
        if Expected.around(table.result, room).explains(case.actual) and (words := table.words()):
            return f"argument {position} {words}"
    return ""


def _lost_term(case: Failing) -> str:
    """Name terms of a product that are missing or counted twice."""
    sums = _sums(case)
    if sums is None:
        return ""
    about = (sums.product, sums.residual, sums.arguments, sums.allowed)
    fault = find_term_fault(*about) or find_range_fault(*about)
    if fault is None:
        return ""
    is_one = fault.count == 1
    which = (
        f"term {fault.first}" if is_one else f"{fault.count} terms, {fault.first} to {fault.last},"
    )
    words = fault.fault(plural=not is_one).replace("missing", "lost")
    return f"{which} of the sum over {sums.product.axis.length:,} ({sums.product.axis}) {words}"


def _term_weights(case: Failing) -> str:
    """Say that all terms of a product have weights of their own, as by a scale of channels."""
    sums = _sums(case)
    if sums is None:
        return ""
    weights = find_term_weights(sums.product, sums.residual, sums.arguments)
    if weights is None:
        return ""
    if float(weights.max() - weights.min()) < UNEXPLAINED * float(weights.abs().max()):
        return ""
    weights[weights.abs() < NO_WEIGHT * weights.abs().max()] = 0.0
    return (
        f"the terms of the sum over {len(weights):,} ({sums.product.axis}) have weights of their "
        f"own, {float(weights.min()):.3g} to {float(weights.max()):.3g}: a scale per channel is off"
    )


@dataclass(frozen=True)
class _Sums:
    """A product, what its result lacks, and how much of that may be left unexplained."""

    product: Product
    arguments: list[Any]
    residual: Tensor
    allowed: float


def _sums(case: Failing) -> _Sums | None:
    if case.subject.output:
        return None
    axes = find_axes(case.subject.like, case.ideal)
    product = find_product(case.ideal, axes, case.expected.values)
    if product is None:
        return None
    residual = case.residual
    rounding = torch.finfo(case.actual.dtype).eps / 2 * float(case.expected.values.norm())
    allowed = max(UNEXPLAINED * float(residual.square().sum()), rounding**2)
    return _Sums(product, case.ideal, residual, allowed)


def _lost_entry(case: Failing) -> str:
    """Name an entry of an inner axis without which the reference gives the actual result."""
    ideal, width = case.ideal, case.expected.width
    for axis in find_axes(case.subject.like, ideal):
        if not axis.is_inner or axis.length > 256:
            continue
        for index in range(axis.length):
            remaining = torch.tensor([i for i in range(axis.length) if i != index])
            result = case.result_of(axis.take(ideal, remaining))
            if result.shape != width.shape:
                continue
            if Expected.around(result, width).explains(case.actual):
                return f"entry {index} of {axis.length} ({axis}) is left out"
    return ""


def _is_smooth(case: Failing, sigma: Tensor, arithmetic: str) -> bool:
    """Tell if noise grows like the roundings that make it: under codes inside it does not."""
    subject = case.subject
    exact = subject.before_output(case.arguments, case.choices, subject.arithmetic).sigma
    if exact is None:
        return True
    fine, coarse = (float(side.median()) for side in (exact, sigma))
    growth = ARITHMETICS[arithmetic] / ARITHMETICS[subject.arithmetic]
    return coarse < STEEPER * growth * fine


def _gain(case: Failing) -> str:
    """Name a factor of a whole result that rounding leaves none of."""
    actual, values = case.actual.double(), case.expected.values
    energy = float(values.square().sum())
    if not 0 < energy < math.inf:
        return ""
    excess = float((case.residual * values).sum()) / energy
    noise = float((actual - (1 + excess) * values).norm()) / (energy * values.numel()) ** 0.5
    if not abs(excess) > max(LEAST_GAIN, CLEAR * noise):
        return ""
    times = factor_words(1 + excess, noise)
    return f"the result is {times} times the expected one, beside other errors: a factor is off"


def _coarse_arithmetic(case: Failing) -> str:
    """Name the coarser arithmetic that an error which looks like rounding comes from."""
    subject = case.subject
    if float(case.wrong.double().mean()) < 0.05:
        return ""
    size = float(case.residual.square().mean().sqrt())
    longest = longest_dimension(case.ideal)
    ratios: dict[str, float] = {}
    for arithmetic in ("tf32", "bfloat16"):
        coarse = subject.expected(case.arguments, case.choices, arithmetic)
        if coarse.sigma is None or bool(coarse.outside(case.actual).any()):
            continue
        if not _is_smooth(case, coarse.sigma, arithmetic):
            continue
        ratio = size / float(coarse.sigma.square().mean().sqrt())
        if WEAKEST_NOISE < ratio < 2 * max(1.0, longest**0.5 / 4):
            ratios[arithmetic] = ratio
    if not ratios:
        return ""
    nearest = min(ratios, key=lambda arithmetic: abs(math.log(ratios[arithmetic])))
    words = _gain(case) or _structure(case, nearest)
    if words:
        return words
    name = "float16 or tf32" if nearest == "tf32" else nearest
    coarse = subject.expected(case.arguments, case.choices, nearest)
    rms = float(coarse.values.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())
    cost = float(coarse.width.median()) / rms if rms else 0.0
    return (
        f"errors look like rounding: sums in {name}, "
        f"not in {subject.arithmetic} (declare arithmetic={nearest!r} if that is meant, which "
        f"allows {100 * cost:{'.0f' if cost >= 0.1 else '.2g'}} % of the RMS per element)"
    )


def describe_uncounted(failing: Sequence[Failing]) -> str:
    """Name entries of a dimension whose rows look as if they were as small as the others."""
    for case in failing:
        if case.source is None or case.source.raised is None or case.subject.output:
            continue
        position, dim = case.source.raised
        x = case.ideal[position]
        if not isinstance(x, Tensor) or case.actual.numel() * x.shape[dim] != x.numel():
            continue
        columns = x.argmax(dim).reshape(-1)
        middle = x.median(dim, keepdim=True).values
        plain = x.scatter(dim, x.argmax(dim, keepdim=True), middle)
        without = case.result_of([*case.ideal[:position], plain, *case.ideal[position + 1 :]])
        should = (case.expected.values - without).reshape(-1).abs()
        does = (case.actual.double() - without).reshape(-1).abs()
        lost = (does < LOST * should) & case.wrong.reshape(-1)
        entries = columns[lost].unique().tolist()
        if 0 < len(entries) <= len(columns.unique()) / 4:
            listed = ", ".join(map(str, entries[:MOST_NAMED]))
            more = ", …" if len(entries) > MOST_NAMED else ""
            which, verb = ("entries", "do") if len(entries) > 1 else ("entry", "does")
            last = " (the last one)" if entries == [x.shape[dim] - 1] else ""
            return (
                f"{which} {listed}{more} of {x.shape[dim]:,}{last} along dimension {dim} of "
                f"argument {position} {verb} not count"
            )
    return ""


def describe_restart(case: Failing) -> str:
    """Name the row from which on a result is that of a sequence which begins there."""
    if case.subject.output or not bool(case.actual.isfinite().all()) or case.wrong.dim() < 2:
        return ""
    for axis in _sequences(case):
        dim = axis.output
        assert dim is not None
        bad = case.wrong.movedim(dim, 0).flatten(1).any(1)
        places = bad.nonzero().reshape(-1).tolist()
        first = places[0] if places else 0
        if not first:
            continue
        later = torch.arange(first, axis.length)
        try:
            result = case.result_of(axis.take(case.ideal, later))
        except LENGTH_REFUSALS:
            continue
        actual = case.actual.index_select(dim, later.to(case.actual.device))
        if result.shape != actual.shape:
            continue
        width = case.expected.select(dim, later).width
        outside = Expected.around(result, width).outside(actual)
        explained = (~outside.movedim(dim, 0).flatten(1).any(1)).long().cumprod(0)
        count = int(explained.sum())
        if int(bad[first : first + count].sum()) < min(FEWEST, len(places)):
            continue
        axis_name = axis_word(case.wrong.dim(), dim)
        where = place_words(places, axis.length, axis_name)
        return (
            f"{where} {'are' if len(places) > 1 else 'is'} wrong: {axis_name} {first} holds what a "
            "sequence gives that begins with it, so what comes before is not carried over"
        )
    return ""


def _sequences(case: Failing) -> Iterator[CutAxis]:
    """List dimensions of the result with all those of arguments that are as long."""
    axes = find_axes(case.subject.like, case.ideal)
    for axis in axes:
        if axis.output is None or case.wrong.shape[axis.output] != axis.length:
            continue
        alike = [other.dimensions for other in axes if other.length == axis.length]
        together = tuple(sorted({dimension for listed in alike for dimension in listed}))
        positions = [position for position, _ in together]
        yield axis
        if together != axis.dimensions and len(positions) == len(set(positions)):
            yield replace(axis, dimensions=together)
