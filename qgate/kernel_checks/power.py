"""The power of a check of a kernel: structure under coarse sums, and the smallest defects."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qgate.causes.factors import figure_words
from qgate.expected.derived import find_axes
from qgate.expected.noise import ARITHMETICS, Expected
from qgate.expected.products import find_product
from qgate.expected.structure import (
    FACTOR,
    RUNS,
    TERM,
    Figure,
    RoundingDraws,
    draw,
    figures,
    shortened,
)
from qgate.kernel_checks.fits import OTHERWISE, ArithmeticFit
from qgate.kernel_checks.fitting import Judgement
from qgate.kernel_checks.record import INCONCLUSIVE, CheckFailure, CheckReport
from qgate.kernel_checks.runs import EXAMPLE, KernelRun
from qgate.kernel_checks.subject import RESULT, Choices, KernelSubject

FULL = "float32"
"""The arithmetic whose bounds are narrow enough for every defect of an element."""
MOST_FACTOR, MOST_NOISE = 0.01, 0.1
"""What a check must be able to see: this factor on all values, this share of the RMS."""
FAIL, PASS = "fail", "pass"
"""What may become of a check that could not have seen a plain defect."""
FACTOR_ON_ALL, TYPICAL = "a factor on all values", "one typical value, of the RMS"
CODE_FACTORS = (1e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5)
"""Excesses of a factor that are planted before results are rounded to codes."""
PLANTED = 1.1
"""Times a claimed defect that is more than what rounding may take from it."""


def find_structure(
    subject: KernelSubject, run: KernelRun, choices: Choices, arithmetic: str | None = None
) -> tuple[list[Figure], str]:
    """Return the figures of a run under coarse sums, and words for the most conspicuous defect.

    arithmetic  another one than the declared one
    """
    arithmetic = arithmetic or subject.arithmetic
    unit = ARITHMETICS.get(arithmetic, 0.0)
    if arithmetic == FULL or not unit:
        return [], ""
    output = subject.output
    ideal = subject.ideal(run.arguments, choices)
    like = subject.under(choices).like
    if output is None:
        draws = draw(like, ideal, unit)
    else:
        draws = draw(like, ideal, unit, lambda v: output.ideal(v, choices[RESULT]))
    if not bool(draws.values.isfinite().all() and run.actual.double().isfinite().all()):
        return [], ""
    return _conspicuous(run.actual, draws)


def hold_structure(
    subject: KernelSubject, runs: Sequence[KernelRun], judgement: Judgement, report: CheckReport
) -> list[Figure]:
    """Fail where roundings do not explain all differences together; return the example's figures.

    Bounds of coarse sums are wide for one element, and hide what is off by less. So do those of
    rounded intermediate values where float noise decides many roundings.
    """
    of_example: list[Figure] = []
    for run in runs:
        if run.name != EXAMPLE and (run.source is None or run.source.relation != "shapes"):
            continue
        fit = judgement.accounted.fits.get(run.name) if judgement.accounted else None
        if fit is not None:
            listed, words = _structure_of_fit(fit)
            of = "the roundings that explain each value"
        else:
            listed, words = find_structure(subject, run, judgement.choices)
            of = f"{subject.arithmetic} sums"
        if run.name == EXAMPLE:
            of_example = listed
        if words:
            where = "" if run.name == EXAMPLE else f" for {run.name}"
            ratio = max(figure.ratio for figure in listed)
            raise CheckFailure(
                f"{subject.name} is wrong{where}: {words}",
                report,
                f"each value lies within the noise of {of}, all together do not: {ratio:.0f} "
                "times the noise of such an estimate",
            )
    return of_example


def _structure_of_fit(fit: ArithmeticFit) -> tuple[list[Figure], str]:
    """Return the figures of a run under the arithmetic that explains each of its values."""
    case = fit.case
    if fit.arithmetic.product is not None or fit.is_exact:  # sums are definite, bounds as narrow
        return [], ""
    if case.subject.output or not bool(
        fit.values.isfinite().all() and case.actual.double().isfinite().all()
    ):
        return [], ""
    return _conspicuous(case.actual, draws_of(fit))


def draws_of(fit: ArithmeticFit) -> RoundingDraws:
    """Evaluate a function in an arithmetic where float noise decides roundings in several ways."""
    case, like = fit.case, fit.case.subject.like
    bits = round(1 - math.log2(torch.finfo(case.actual.dtype).eps))
    generator = torch.Generator().manual_seed(0)
    residuals = [shortened(fit.redrawn(seed), bits, generator) - fit.values for seed in range(RUNS)]
    return RoundingDraws.of(like, case.ideal, fit.values, torch.stack(residuals))


def _conspicuous(actual: Tensor, draws: RoundingDraws) -> tuple[list[Figure], str]:
    listed = list(figures(actual, draws))
    worst = max(listed, key=lambda figure: figure.ratio, default=None)
    if worst is None or not worst.is_defect:
        return listed, ""
    return listed, figure_words(worst, draws.values, draws.product)


def measure_power(
    subject: KernelSubject,
    run: KernelRun,
    judgement: Judgement,
    listed: Sequence[Figure],
    report: CheckReport,
) -> None:
    """Work out the smallest defects that would have been caught on the example.

    listed  its figures under coarse sums
    """
    fit = judgement.accounted.fits.get(run.name) if judgement.accounted else None
    expected = judgement.expected(run) if fit is None else fit.widened
    actual = run.actual if fit is None else fit.case.actual
    values = expected.values
    if not values.numel():
        return
    room = _room(values, expected, actual.dtype)
    rms = float(values.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())
    report.noise = float(room.median()) / rms
    defects = report.smallest_defect
    has_codes = bool(subject.output) or actual.dtype.itemsize == 1
    if has_codes:  # the step of a format is no noise
        wide = subject.before_output(run.arguments, judgement.choices, subject.arithmetic)
        before, width = (wide.values, wide.width) if fit is None else (fit.values, fit.room)
        report.noise = float(width.median()) / rms
        factor = _smallest_factor_of_codes(subject, judgement.choices, before, expected, actual)
    else:
        factor = _smallest_factor(actual, expected, share=0.0 if fit is None else OTHERWISE)
    for figure in listed:
        if figure.kind == FACTOR and figure.dim is None and figure.argument is None:
            factor = min(factor, figure.smallest)
    # A factor that meets a result of 16 bits changes nothing below half a step, and little more
    # may be what rounded intermediate values explain.
    if not has_codes:
        factor = PLANTED * max(factor, torch.finfo(actual.dtype).eps / 2)
    defects[FACTOR_ON_ALL] = factor
    defects[TYPICAL] = report.noise
    if subject.output or fit is not None:
        return
    ideal = subject.ideal(run.arguments, judgement.choices)
    product = find_product(ideal, find_axes(subject.like, ideal), values)
    if product is not None:
        kind = f"the weakest of {product.axis.length:,} terms of a sum"
        defects[kind] = product.smallest_share(ideal, room)
        for figure in listed:
            if figure.kind == TERM:
                defects[kind] = min(defects[kind], _weakest(product.energy(ideal), figure))


def _weakest(energy: Tensor, figure: Figure) -> float:
    """Return the share of the weakest term that is seen, from that of another one."""
    weakest = float(energy[energy > 0].min())
    return figure.smallest * math.sqrt(float(energy[figure.index]) / weakest)


def _room(values: Tensor, expected: Expected, dtype: torch.dtype) -> Tensor:
    """Return how far a value may be off, away from zero, and still round to a bound."""
    low, high = expected.bounds(dtype)
    outward = torch.where(values < 0, -low, high)
    return outward + _step(outward, dtype) / 2 - values.abs()


def _step(values: Tensor, dtype: torch.dtype) -> Tensor:
    _, exponents = torch.frexp(values)
    return torch.exp2(exponents.double()) * (torch.finfo(dtype).eps / 2)


def _smallest_factor(actual: Tensor, expected: Expected, share: float) -> float:
    """Return the smallest excess of a factor, up or down, that leaves the bounds.

    The factor may meet values before they are rounded to their dtype, or after.
    share  of the values that may lie outside
    """
    low, high = expected.bounds(actual.dtype)
    negative = expected.values < 0
    most, least = torch.where(negative, -low, high), torch.where(negative, -high, low)
    beyond = most + _step(most, actual.dtype) / 2
    below = least - _step(least.abs(), actual.dtype) / 2
    factors = []
    met = actual.double(), expected.values
    for values in met:
        size = values.abs()
        usable = (size > 0) & values.isfinite() & (values * expected.values > 0)
        if expected.free is not None:
            usable &= ~expected.free
        if not bool(usable.any()):
            return math.inf
        count = min(max(int(share * size.numel()), 1) + 1 if share else 1, int(usable.sum()))
        for room in (beyond - size, size - below):
            factors.append(float((room / size)[usable].kthvalue(count).values))
    return max(factors)


def _smallest_factor_of_codes(
    subject: KernelSubject, choices: Choices, before: Tensor, expected: Expected, actual: Tensor
) -> float:
    """Return the smallest excess of a factor that is seen where results are codes of a format.

    Codes move only where a value crosses a boundary of rounding: a factor is planted before.
    """

    def is_seen(factor: float) -> bool:
        values = before * factor
        if subject.output:
            values = subject.output.ideal(values, choices[RESULT])
        return bool(expected.outside(values.to(actual.dtype)).any())

    return next((f for f in CODE_FACTORS if is_seen(1 + f) and is_seen(1 - f)), math.inf)


def hold_power(report: CheckReport, listed: Sequence[Figure], inconclusive: str) -> None:
    """Fail a check that could not have seen a plain defect, or say so aloud where that is allowed.

    listed        figures under coarse sums, which see what noise of one element hides
    inconclusive  "fail" or "pass"
    """
    factor = report.smallest_defect.get(FACTOR_ON_ALL, 0.0)
    noise = 0.0 if listed else report.smallest_defect.get(TYPICAL, 0.0)
    if factor <= MOST_FACTOR and noise <= MOST_NOISE:
        return
    why = (
        f"a factor of {100 * MOST_FACTOR:g} % on all values would not have been seen, one of "
        f"{_percent(factor)} would"
        if factor > MOST_FACTOR
        else f"float noise of a typical value is {_percent(noise)} of the RMS"
    )
    if inconclusive == PASS:
        report.notes.append(f"inconclusive, and passed as inconclusive={PASS!r}: {why}")
        return
    raise CheckFailure(
        f"{INCONCLUSIVE} {report.name} agrees, but {why}; give an example of more values, or finer "
        f"sums than these, or inconclusive={PASS!r} if that is enough",
        report,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 10 else "more than 1,000 %"
