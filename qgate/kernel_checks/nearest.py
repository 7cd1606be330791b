"""Defects of kernels in 16 bits, named under the roundings that come nearest to the result.

A factor of 0.4 % is lost among roundings if a result is compared with exact sums. Beside what the
nearest arithmetic gives it stands out: that estimate has a noise, and only what is many times that
and leaves nothing but roundings is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.causes.factors import figure_words
from qgate.expected.intermediates import Arithmetic, AttentionRule, eager_sites
from qgate.expected.structure import FACTOR, OFFSET, TERM, Draws, Figure, figures
from qgate.kernel_checks.arithmetic import Case, Fit
from qgate.kernel_checks.power import drawn
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
    draws: Draws
    left: float


def describe_under_roundings(case: Failing) -> str:
    """Name the factor, term or offset that explains a result in 16 bits, but for its roundings."""
    explanation = explain_under_roundings(case)
    if explanation is None or explanation.left > LEFT:
        return ""
    draws = explanation.draws
    return figure_words(explanation.figure, draws.values, draws.product)


def explain_under_roundings(case: Failing) -> Explanation | None:
    """Return the most conspicuous defect under the nearest arithmetic, None if there is none."""
    subject = case.subject
    if subject.output or not bool(case.actual.isfinite().all()):
        return None
    run = KernelRun(case.name, case.arguments, case.actual)
    sample = Case.of(subject, case.choices, run)
    if not sample.halves or not bool(sample.exact.values.isfinite().all()):
        return None
    fits = sorted((Fit(sample, a) for a in _arithmetics(sample)), key=_unexplained)
    best: Explanation | None = None
    for fit in fits[:WORTH]:
        draws = drawn(fit)
        listed = list(figures(sample.actual, draws))
        worst = max(listed, key=lambda figure: figure.ratio, default=None)
        if worst is None or not worst.is_defect:
            continue
        explanation = Explanation(worst, draws, _left(sample.actual, draws, worst))
        if best is None or explanation.left < best.left:
            best = explanation
    return best


def _arithmetics(case: Case) -> Iterator[Arithmetic]:
    """List what kernels in 16 bits round: nothing, all, dequantized arguments, P of attention."""
    operators = case.operators()
    names = tuple(operators.names)
    for dtype in case.halves:
        yield Arithmetic(dtype, names=names)
        eager = Arithmetic(dtype, eager_sites(names), names=names)
        quantized = tuple(case.subject.inputs)
        if eager.sites:
            yield eager
        if quantized:
            yield Arithmetic(dtype, frozenset(), quantized, names=names)
            yield Arithmetic(dtype, eager.sites, quantized, names=names)
        if operators.has_attention:
            for tile in TILES:
                if tile < operators.keys:
                    yield Arithmetic(dtype, attention=AttentionRule(dtype, tile), names=names)
            yield Arithmetic(dtype, attention=AttentionRule(dtype, is_coarse=True), names=names)


def _unexplained(fit: Fit) -> float:
    """Return the energy of what an arithmetic and one factor on the result leave."""
    values = fit.values
    residual = fit.case.actual.double() - values
    size = (residual * values).sum() / values.square().sum().clamp_min(1e-300)
    return float((residual - size * values).square().sum())


def _left(actual: Tensor, draws: Draws, figure: Figure) -> float:
    """Return the RMS of what a defect leaves, in units of typical roundings."""
    rest = actual.double() - draws.values
    if figure.kind == TERM and draws.product is not None:
        rest = rest - figure.size * draws.product.term(figure.index, draws.arguments)
    elif figure.kind in (FACTOR, OFFSET):
        if figure.kind == FACTOR:
            change = figure.size * draws.directions[figure.argument]
        else:
            change = figure.size * draws.values.square().mean().sqrt() * torch.ones_like(rest)
        if figure.dim is not None:
            chosen = torch.arange(rest.shape[figure.dim], device=rest.device) == figure.index
            shape = [1] * rest.dim()
            shape[figure.dim] = -1
            change = change * chosen.reshape(shape)
        rest = rest - change
    return float((rest / draws.scale).square().mean().sqrt())
