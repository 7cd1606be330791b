"""Factors and offsets with as many digits as are known, and the figures of a result in words."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qgate.causes.outputs import axis_word, place_words
from qgate.expected.products import Product
from qgate.expected.structure import FACTOR, OFFSET, SINGULAR, TERM, Figure

OTHERWISE = 0.02
"""Share of elements whose rounding float noise may turn the other way."""
FEWEST_RATIOS = 32
MOST_DIGITS = 6
ZERO = 1e-3
"""Factor below which what is left of a part is called zero."""
TERM_NEAR = 0.25
"""Distance of a term's share from that of a lost or repeated one within which it is called so."""


def factor_words(factor: float, noise: float) -> str:
    """Write a factor with the digits that its noise leaves, as 1.0102 of a noise of 0.0002."""
    digits = MOST_DIGITS if noise <= 0 else -math.floor(math.log10(noise))
    digits = min(max(digits, 0), MOST_DIGITS)
    text = f"{factor:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


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
    allowed = int(OTHERWISE * len(before)) + 1
    low = float(least.kthvalue(max(len(least) - allowed, 1)).values)
    high = float(most.kthvalue(min(allowed + 1, len(most))).values)
    factor = (low + high) / 2
    inside = float(((least <= factor) & (most >= factor)).double().mean())
    unchanged = float(((least <= 1) & (most >= 1)).double().mean())
    if inside < 1 - 3 * OTHERWISE or unchanged > inside - 3 * OTHERWISE:
        return None
    return factor, abs(high - low) / 2


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
