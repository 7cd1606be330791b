"""Functions beside the result of a kernel in 16 bits, under the roundings that kernels have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qgate.expected.intermediates import HALVES, Arithmetic
from qgate.expected.noise import evaluate
from qgate.expected.operators import evaluate_as, trace
from qgate.expected.stages import BEFORE_CAST
from qgate.expected.structure import RoundingDraws
from qgate.kernel_checks.nearest import likely_arithmetics
from qgate.kernel_checks.runs import Failing

MUCH = 0.25
"""Share of what the reference leaves unexplained that a fault may leave."""
ROUNDINGS = 4.0
"""Times the energy of roundings that a fault may leave."""
FINITE = 0.75
"""Share of a result that must be finite under a fault."""
FLOAT_NOISE = 1 / 16
"""Typical float noise as a share of its bounds."""
EXACT = "exact sums"


def energy_left(actual: Tensor, values: Tensor | None) -> float:
    """Return the energy of what values leave of a result, infinite if they are not like it."""
    if values is None or values.shape != actual.shape:
        return math.inf
    energy = float((actual - values).square().sum())
    if math.isfinite(energy):
        return energy
    comparable = values.isfinite() & actual.isfinite()
    if float(comparable.double().mean()) < FINITE * float(actual.isfinite().double().mean()):
        return math.inf
    return float(torch.where(comparable, actual - values, 0.0).square().sum())


@dataclass(frozen=True)
class FunctionFit:
    """A function beside a result, under each arithmetic that kernels have.

    energies   arithmetic in words → energy that is left
    roundings  energy of the roundings of the coarsest arithmetic, and of the result's last one
    """

    energies: dict[str, float]
    roundings: float
    results: dict[str, Tensor]
    like: Callable[..., Any]
    ideal: list[Any]
    actual: Tensor

    @classmethod
    def of(cls, case: Failing, like: Callable[..., Any], ideal: list[Any]) -> FunctionFit:
        """Compare a result with that of a function under each likely arithmetic."""
        actual = case.actual.double()
        exact = evaluate(like, ideal)
        results = {EXACT: exact, **dict(_rounded_results(case, like, ideal))}
        noise = float((FLOAT_NOISE * case.expected.width).square().sum())
        if case.actual.dtype in HALVES:
            eps = torch.finfo(case.actual.dtype).eps
            noise += (eps / 12**0.5) ** 2 * float(exact.nan_to_num(0.0, 0.0, 0.0).square().sum())
        energies = {words: energy_left(actual, result) for words, result in results.items()}
        noise += max(energy_left(exact, result) for result in results.values())
        return cls(energies, noise, results, like, ideal, actual)

    @property
    def nearest(self) -> str:
        """Return the arithmetic that leaves least."""
        return min(self.energies, key=lambda words: self.energies[words])

    @property
    def least(self) -> float:
        """Return the energy that the nearest arithmetic leaves."""
        return self.energies[self.nearest]

    def with_factors(self, arithmetic: str) -> float:
        """Return what is left where each argument and the result may have a factor, too."""
        result = self.results.get(arithmetic)
        if result is None:
            return math.inf
        residual = (self.actual - result).nan_to_num(0.0, 0.0, 0.0)
        sizes = torch.linalg.lstsq(self._basis, residual.reshape(-1, 1)).solution
        sizes[1:][sizes[1:].abs() > 1] = 0.0  # larger ones are no factors on an argument
        return energy_left(self.actual, result + (self._basis @ sizes).reshape(residual.shape))

    @cached_property
    def _basis(self) -> Tensor:
        exact = self.results[EXACT]
        directions = RoundingDraws.of(self.like, self.ideal, exact, exact[None]).directions
        return torch.stack([direction.reshape(-1) for direction in directions.values()], 1)

    def is_explained_by(self, fault: FunctionFit) -> bool:
        """Tell if this is the reference, and a fault leaves no more than roundings and factors."""
        roundings = min(self.roundings, fault.roundings)
        if fault.least > min(ROUNDINGS * roundings, MUCH * self.least):
            return False
        common = [words for words in fault.energies if words in self.energies]
        if not common:
            return True
        nearest = min(common, key=lambda words: fault.energies[words])
        return fault.energies[nearest] < self.with_factors(nearest)


def explains_closely(case: Failing, arguments: list[Any]) -> bool:
    """Tell if other arguments leave no more than roundings, and the given ones much more."""
    like = case.subject.like
    reference = FunctionFit.of(case, like, case.ideal)
    return reference.is_explained_by(FunctionFit.of(case, like, arguments))


def _rounded_results(
    case: Failing, like: Callable[..., Any], ideal: Sequence[Any]
) -> Iterator[tuple[str, Tensor]]:
    tensors = [case.actual, *(x for x in case.arguments if isinstance(x, Tensor))]
    halves = [dtype for dtype in dict.fromkeys(t.dtype for t in tensors) if dtype in HALVES]
    operators = trace(like, ideal)
    listed: list[Arithmetic] = list(likely_arithmetics(operators, halves, case.subject.inputs))
    for arithmetic in listed:
        if arithmetic.size or arithmetic.attention is not None:
            yield _kind(arithmetic), evaluate_as(like, ideal, arithmetic)


def _kind(arithmetic: Arithmetic) -> str:
    """Name an arithmetic by what it rounds, whatever the operators are."""
    attention = arithmetic.attention.words() if arithmetic.attention else ""
    some = "operators" if arithmetic.sites else ""
    named = {arithmetic.names[site] for site in arithmetic.sites}
    if BEFORE_CAST in named:
        some = "before casts, products" if len(named) > 1 else "before casts"
    return f"{arithmetic.dtype} {attention} {some} {arithmetic.arguments}"
