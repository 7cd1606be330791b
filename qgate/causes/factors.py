"""Factors and offsets with as many digits as are known, and the figures of a result in words."""

from __future__ import annotations

import torch
from torch import Tensor

from qgate.causes.places import axis_word, factor_words, place_words
from qgate.expected.products import Product
from qgate.expected.structure import FACTOR, OFFSET, SINGULAR, TERM, Figure

OTHERWISE = 0.02
"""Share of elements whose rounding float noise may turn the other way."""
FEWEST_RATIOS, FEW_MOVED = 32, 16
"""Elements from which a factor is read, and those that must have moved by it."""
ZERO = 1e-3
"""Factor below which what is left of a part is called zero."""
TERM_NEAR = 0.25
"""Distance of a term's share from that of a lost or repeated one within which it is called so."""


def find_rounded_factor(actual: Tensor, values: Tensor) -> tuple[float, float] | None:
    """Return the factor by which a rounded result was multiplied, and half its uncertainty.

    Each element leaves an interval of factors that would round to it. The middle of what most of
    them have in common is the factor; None if they have nothing in common, or it may be 1.
    """
    before = values.to(actual.dtype).double()
    after = actual.double()
    usable = (before != 0) & after.isfinite() & (after * before > 0)
    if int(usable.sum()) < FEWEST_RATIOS or int((~usable & (before != 0)).sum()):
        return None
    before, after = before[usable].abs(), after[usable].abs()
    _, exponents = torch.frexp(after)
    half = torch.exp2(exponents.double()) * (torch.finfo(actual.dtype).eps / 4)
    least, most = (after - half) / before, (after + half) / before
    candidates = torch.cat([least, most, least.new_ones(1)]).sort().values
    candidates = (candidates[1:] + candidates[:-1]) / 2
    consistent = torch.searchsorted(least.sort().values, candidates, right=True)
    consistent -= torch.searchsorted(most.sort().values, candidates)
    best = int(consistent.max())
    unchanged = int(((least <= 1) & (most >= 1)).sum())
    inconsistent = len(before) - best
    if inconsistent > OTHERWISE * len(before) or best - unchanged < max(
        FEW_MOVED, 4 * inconsistent
    ):
        return None
    factors = candidates[consistent == best]
    low, high = float(factors.min()), float(factors.max())
    return (low + high) / 2, max(high - low, float(half.min() / before.max()) / len(before)) / 2


def figure_words(figure: Figure, expected: Tensor, product: Product | None) -> str:
    """Say which defect a figure is the size of."""
    where = "the result"
    if figure.dim is not None:
        shape = expected.shape
        axis = axis_word(expected.dim(), figure.dim)
        where = place_words([figure.index], shape[figure.dim], axis)
    if figure.kind == FACTOR:
        if abs(1 + figure.size) <= ZERO and figure.argument is None:
            return f"{where} is zero"
        times = factor_words(1 + figure.size, figure.noise)
        if figure.argument is not None:
            in_place = "" if figure.dim is None else f" in {where}"
            return f"argument {figure.argument} counts {times} times{in_place}"
        if figure.dim is None:
            return f"the result is {times} times the expected one: a scale or factor is off"
        return f"{where} is {times} times the expected: a scale of this part is off"
    if figure.kind == OFFSET:
        return f"{where} is off by {figure.size:.2g} of the RMS in all: an offset or bias is off"
    if figure.kind == TERM and product is not None:
        of = f"term {figure.index} of the sum over {product.axis.length:,} ({product.axis})"
        if abs(figure.size + 1) < TERM_NEAR:
            return f"{of} is lost"
        if abs(figure.size - 1) < TERM_NEAR:
            return f"{of} is added twice"
        return f"{of} has {factor_words(1 + figure.size, figure.noise)} times the right weight"
    assert figure.kind in (SINGULAR, TERM)
    return "differences add up in one direction, as where a term or a row of a matrix is off"
