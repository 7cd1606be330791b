"""Structure in the differences of a result: what the roundings of a coarse arithmetic do not make.

Bounds of coarse sums are wide for one element. Over many elements roundings cancel, and a defect
does not: a factor, an offset, a lost term. Each figure here is the size of such a defect, estimated
from all differences, beside the noise of that estimate. The noise comes from two sources: results
under random roundings of all operators, and the differences that the figure leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qgate.expected.derived import find_axes
from qgate.expected.noise import evaluate, smoothed
from qgate.expected.operators import evaluate_changed
from qgate.expected.products import Product, find_product

FIGURE = 7.0
"""Times its noise from which on a figure is a defect: it is the largest of some thousand."""
RUNS = 8
SPREAD = 1.4
"""Times the largest singular value of roundings, of which a few runs are seen."""
FEWEST = 8
"""Differences that must be left over after a fit for its noise to be known."""
STEP = 2.0**-10
"""Relative change of an argument by which its effect is measured."""
LEAST_EFFECT = 1e-6
"""Share of a result's energy that a factor on an argument must change: norms divide it out."""
FACTOR, OFFSET, TERM, SINGULAR = "factor", "offset", "term", "singular value"


@dataclass(frozen=True)
class Figure:
    """The size of one kind of defect in a result, and the noise of that size.

    kind      a factor or offset of values, a term of a sum, or a singular value
    size      excess of the factor, the offset, the share of the term that is too much
    argument  position of the argument that has the factor, None for the result
    dim       dimension of the result of which one entry has the defect, None for all values
    index     that entry, or the number of the term
    """

    kind: str
    size: float
    noise: float
    argument: int | None = None
    dim: int | None = None
    index: int = 0

    @property
    def ratio(self) -> float:
        """Return the size in units of its noise."""
        return abs(self.size) / self.noise if self.noise else 0.0

    @property
    def is_defect(self) -> bool:
        """Tell if roundings do not explain the figure."""
        return self.ratio > FIGURE

    @property
    def smallest(self) -> float:
        """Return the smallest defect of this kind that is seen for sure."""
        return (FIGURE + self.ratio) * self.noise


@dataclass(frozen=True)
class RoundingDraws:
    """Results under random roundings, less the expected values; and what factors would change.

    residuals   one result per run
    directions  position of an argument → change of the result per factor on it; None: the values
    """

    arguments: list[Any]
    values: Tensor
    residuals: Tensor
    directions: dict[int | None, Tensor]
    product: Product | None = None
    """The product that the function is, if it is one."""

    @classmethod
    def of(
        cls,
        like: Callable[..., Any],
        arguments: Sequence[Any],
        values: Tensor,
        residuals: Tensor,
        quantize: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> RoundingDraws:
        """Measure what a factor on each argument changes, beside residuals of some runs."""
        exact = quantize(evaluate(like, arguments))
        directions: dict[int | None, Tensor] = {None: values.nan_to_num(0.0, 0.0, 0.0)}
        energy = float(directions[None].square().sum())
        for position, argument in enumerate(arguments):
            if not _is_float(argument):
                continue
            near = [*arguments]
            near[position] = argument.double() * (1 + STEP)
            change = (quantize(evaluate(like, near)) - exact).nan_to_num_(0.0, 0.0, 0.0) / STEP
            measured = directions.values()
            if float(change.square().sum()) > LEAST_EFFECT * energy and not any(
                _is_parallel(change, other) for other in measured
            ):
                directions[position] = change
        product = find_product(arguments, find_axes(like, arguments), exact)
        return cls(list(arguments), values, residuals, directions, product)

    @property
    def scale(self) -> Tensor:
        """Return the typical rounding error of each element."""
        rms = smoothed(self.residuals.square().mean(0)).sqrt()
        usable = rms[rms > 0]
        return rms.clamp_min(float(usable.min()) if usable.numel() else 1.0)


def draw(
    like: Callable[..., Any],
    arguments: Sequence[Any],
    unit: float,
    quantize: Callable[[Tensor], Tensor] = lambda values: values,
    seed: int = 0,
) -> RoundingDraws:
    """Evaluate a function under random roundings of its arguments and of each operator's result.

    unit      the unit roundoff
    quantize  what becomes of the result
    """
    values = quantize(evaluate(like, arguments))
    generator = torch.Generator().manual_seed(seed)
    bits = round(-math.log2(unit))

    def change(value: Tensor, _site: int = 0, _name: str = "") -> Tensor:
        return shortened(value, bits, generator)

    residuals = []
    for _ in range(RUNS):
        near = [change(x.double()) if _is_float(x) else x for x in arguments]
        result = quantize(change(evaluate_changed(like, near, change)))
        residuals.append((result - values).nan_to_num_(0.0, 0.0, 0.0))
    return RoundingDraws.of(like, arguments, values, torch.stack(residuals), quantize)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_parallel(a: Tensor, b: Tensor) -> bool:
    size = float((a * b).sum()) / max(float(b.square().sum()), torch.finfo(torch.float64).tiny)
    return float((a - size * b).square().sum()) <= 1e-4 * float(a.square().sum())


def shortened(values: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """Round values to so many significant bits, on a grid that is stretched by a random factor.

    What lies close together is rounded alike, as real roundings do.
    """
    stretch = float(2 ** torch.rand((), generator=generator, dtype=torch.float64))
    fractions, exponents = torch.frexp(values * stretch)
    short = torch.ldexp((fractions * 2.0**bits).round() / 2.0**bits, exponents) / stretch
    return torch.where(values.isfinite(), short, values)


def figures(actual: Tensor, draws: RoundingDraws) -> Iterator[Figure]:
    """List the figures of what a result differs by from the values of draws."""
    residual = (actual.double() - draws.values).nan_to_num_(0.0, 0.0, 0.0)
    if residual.numel() <= FEWEST:
        return
    scale = draws.scale
    mine, samples = residual / scale, draws.residuals / scale
    ones = (1 / scale) * draws.directions[None].square().mean().sqrt()
    regressors = [(FACTOR, position, d / scale) for position, d in draws.directions.items()]
    for kind, argument, regressor in [*regressors, (OFFSET, None, ones)]:
        kept_dims = [dim for dim in range(mine.dim()) if 1 < mine.shape[dim] < mine.numel()]
        for dim in [None, *kept_dims]:
            if kind == OFFSET and dim is None:
                continue
            sizes, noise = _regressed(mine, samples, regressor, dim)
            if not sizes.numel():
                continue
            index = int((sizes.abs() / noise).argmax())
            yield Figure(kind, float(sizes[index]), float(noise[index]), argument, dim, index)
    yield from _terms(residual, draws)
    yield from _singular_values(mine, samples)


def _regressed(
    mine: Tensor, samples: Tensor, regressor: Tensor, dim: int | None
) -> tuple[Tensor, Tensor]:
    """Fit one factor of a regressor, or one for each entry of a dimension; return their noise."""

    def rows(values: Tensor) -> Tensor:
        return values.reshape(1, -1) if dim is None else values.movedim(dim, 0).flatten(1)

    y, x = rows(mine), rows(regressor)
    power = x.square().sum(1)
    usable = power > 0
    if y.numel() - len(y) < FEWEST or not bool(usable.any()):
        return y.new_zeros(0), y.new_zeros(0)
    power = torch.where(usable, power, 1.0)
    sizes = (y * x).sum(1) / power
    remainder = (y - sizes[:, None] * x).square()
    pooled = remainder.sum() / (remainder.numel() - len(remainder)) / power
    own = (remainder * x.square()).sum(1) / power.square()
    null = torch.stack([(rows(run) * x).sum(1) / power for run in samples]).square().mean(0)
    null = torch.maximum(null, null[usable].median())
    noise = (torch.maximum(pooled, own) + null).sqrt()
    return sizes, torch.where(usable & (noise > 0), noise, math.inf)


def _terms(residual: Tensor, draws: RoundingDraws) -> Iterator[Figure]:
    """Yield the most conspicuous term of a sum, if the function is a product."""
    product = draws.product
    if product is None:
        return
    t, shares = product.terms(residual, draws.arguments)
    own = (shares / t).abs().nan_to_num(0.0, 0.0, 0.0)
    null = torch.stack([product.terms(run, draws.arguments)[1] for run in draws.residuals])
    null = null.square().mean(0)
    noise = (own.square() + torch.maximum(null, null.median())).sqrt()
    usable = noise > 0
    if bool(usable.any()):
        index = int(torch.where(usable, shares.abs() / noise.clamp_min(1e-300), 0.0).argmax())
        yield Figure(TERM, float(shares[index]), float(noise[index]), index=index)


def _singular_values(mine: Tensor, samples: Tensor) -> Iterator[Figure]:
    """Yield the largest singular value beside those of roundings and of random signs."""
    if mine.dim() < 2 or min(mine.shape[-2:]) < FEWEST:
        return
    generator = torch.Generator().manual_seed(0)
    flipped = []
    for _ in range(RUNS // 2):
        signs = torch.randint(0, 2, mine.shape, generator=generator) * 2 - 1
        flipped.append(_largest(mine * signs.to(mine.device)))
    null = max(flipped) + max(_largest(run) for run in samples)
    yield Figure(SINGULAR, _largest(mine), SPREAD / FIGURE * null)


def _largest(values: Tensor) -> float:
    return float(torch.linalg.matrix_norm(values, 2).max())
