"""Defects of kernels in 16 bits, named under the roundings that come nearest to the result.

A factor of 0.4 % is lost among roundings if a result is compared with exact sums. Beside what the
nearest arithmetic gives it stands out: that estimate has a noise, and only what is many times that
and leaves nothing but roundings is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.causes.factors import figure_words, find_rounded_factor
from qgate.causes.places import factor_words
from qgate.expected.intermediates import (
    CODES,
    HALVES,
    INSIDE,
    MULTIPLYING,
    SCALED,
    Arithmetic,
    AttentionRule,
    eager_sites,
)
from qgate.expected.operators import Operators
from qgate.expected.stages import BEFORE_CAST
from qgate.expected.structure import FACTOR, OFFSET, TERM, Figure, RoundingDraws, figures
from qgate.kernel_checks.fits import ArithmeticFit, Case
from qgate.kernel_checks.power import draws_of
from qgate.kernel_checks.runs import Failing, KernelRun

LEFT = 2.5
"""Times the energy's root of roundings that may be left where a defect is called the cause."""
TILES = (0, 64, 128, 32, 16)
"""Keys per step of fused attention that are tried; 0 for all at once."""
WORTH = 2
"""Arithmetics that are looked at closely."""


@dataclass(frozen=True)
class Explanation:
    """A defect under an arithmetic, and what it leaves, in units of roundings."""

    figure: Figure
    draws: RoundingDraws
    remainder: float


def describe_under_roundings(fits: list[ArithmeticFit]) -> str:
    """Name the factor, term or offset that explains a result in 16 bits, but for its roundings.

    fits  the result beside the nearest arithmetics
    """
    words = next((words for words in map(_rounded_factor, fits) if words), "")
    explanation = None if words else _explanation(fits)
    if explanation is None or explanation.remainder > LEFT:
        return words
    draws = explanation.draws
    return figure_words(explanation.figure, draws.values, draws.product)


def nearest_fits(case: Failing) -> list[ArithmeticFit]:
    """Return a result in 16 bits, or of such arguments, beside the nearest arithmetics."""
    subject = case.subject
    if subject.output or not bool(case.actual.isfinite().all()):
        return []
    run = KernelRun(case.name, case.arguments, case.actual)
    sample = Case.of(subject, case.choices, run)
    if not sample.halves or not bool(sample.exact.values.isfinite().all()):
        return []
    exact = sample.exact.values
    directions = RoundingDraws.of(subject.like, sample.ideal, exact, exact[None]).directions
    basis = torch.stack([direction.reshape(-1) for direction in directions.values()], 1)
    arithmetics = likely_arithmetics(sample.operators, sample.halves, subject.inputs)
    fits = [ArithmeticFit(sample, arithmetic) for arithmetic in arithmetics]
    finite = [fit for fit in fits if bool(fit.values.isfinite().all())]
    return sorted(finite, key=lambda fit: _unexplained(fit, basis))[:WORTH]


def _rounded_factor(fit: ArithmeticFit) -> str:
    """Name a factor that meets a result after it was rounded to 16 bits."""
    if fit.case.actual.dtype not in HALVES:
        return ""
    factor = find_rounded_factor(fit.case.actual, fit.values)
    if factor is None:
        return ""
    times = factor_words(*factor)
    return f"the result is {times} times the expected one: a scale or factor is off"


def _explanation(fits: list[ArithmeticFit]) -> Explanation | None:
    """Return the most conspicuous defect under the nearest arithmetics, None if there is none."""
    best: Explanation | None = None
    for fit in fits:
        draws = draws_of(fit)
        listed = list(figures(fit.case.actual, draws))
        worst = max(listed, key=lambda figure: figure.ratio, default=None)
        if worst is None or not worst.is_defect:
            continue
        explanation = Explanation(worst, draws, _left(fit.case.actual, draws, worst))
        if best is None or explanation.remainder < best.remainder:
            best = explanation
    return best


def likely_arithmetics(
    operators: Operators, halves: Iterable[torch.dtype], declared: Iterable[int]
) -> Iterator[Arithmetic]:
    """List what kernels in 16 bits round: nothing, all, dequantized arguments, P of attention.

    halves    the dtypes of 16 bits among those of arguments and result
    declared  positions of dequantized arguments
    """
    names = tuple(operators.names)
    quantized = tuple(declared)
    for dtype in halves:
        yield Arithmetic(dtype, names=names)
        eager = Arithmetic(dtype, eager_sites(names), names=names)
        if eager.sites:
            yield eager
        before_casts = frozenset(site for site, name in enumerate(names) if name == BEFORE_CAST)
        if before_casts:
            yield Arithmetic(dtype, before_casts, names=names)
            products = frozenset(n for n, name in enumerate(names[:-1]) if name in MULTIPLYING)
            yield Arithmetic(dtype, before_casts | products, names=names)
        for inner in (CODES, SCALED):
            sites = frozenset(
                site for site, name in enumerate(names) if name.endswith(INSIDE + inner)
            )
            if sites:
                yield Arithmetic(dtype, sites, names=names)
        if quantized:
            yield Arithmetic(dtype, frozenset(), quantized, names=names)
            yield Arithmetic(dtype, eager.sites, quantized, names=names)
        if operators.has_attention:
            for tile in TILES:
                if tile < operators.keys:
                    yield Arithmetic(dtype, attention=AttentionRule(dtype, tile), names=names)
            for lanes in (16, 8):
                rule = AttentionRule(dtype, lanes=lanes)
                yield Arithmetic(dtype, attention=rule, names=names)


def _unexplained(fit: ArithmeticFit, basis: Tensor) -> float:
    """Return the energy of what an arithmetic and a factor on each argument leave."""
    residual = (fit.case.actual.double() - fit.values).reshape(-1, 1)
    sizes = torch.linalg.lstsq(basis, residual).solution
    return float((residual - basis @ sizes).square().sum())


def _left(actual: Tensor, draws: RoundingDraws, figure: Figure) -> float:
    """Return the RMS of what a defect leaves, in units of typical roundings."""
    residual = actual.double() - draws.values
    if figure.kind == TERM and draws.product is not None:
        residual = residual - figure.size * draws.product.term(figure.index, draws.arguments)
    elif figure.kind in (FACTOR, OFFSET):
        if figure.kind == FACTOR:
            change = figure.size * draws.directions[figure.argument]
        else:
            change = figure.size * draws.values.square().mean().sqrt() * torch.ones_like(residual)
        if figure.dim is not None:
            chosen = (
                torch.arange(residual.shape[figure.dim], device=residual.device) == figure.index
            )
            shape = [1] * residual.dim()
            shape[figure.dim] = -1
            change = change * chosen.reshape(shape)
        residual = residual - change
    return float((residual / draws.scale).square().mean().sqrt())
