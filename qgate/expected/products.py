"""Products of two arguments, and which of their terms a residual says are missing."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qgate.expected.derived import CutAxis

LONGEST_RANGE = 2048
"""Terms of the longest sum of which ranges are looked for: their scalar products are kept."""
MOST_TERMS = 256
"""Steps of the search for lost terms: two for each of a tile of 128."""


@dataclass(frozen=True)
class Product:
    """A sum over one inner axis of products of two arguments, as einsum writes it."""

    positions: tuple[int, int]
    first: str
    second: str
    result: str
    inner: str
    axis: CutAxis

    def energy(self, arguments: Sequence[Any]) -> Tensor:
        """Return the energy of each term: the sum of squares of what it adds to the result."""
        first, second = (arguments[position].double() for position in self.positions)
        equation = f"{self.first},{self.second}->{self.inner}"
        return torch.einsum(equation, first.square(), second.square())

    def terms(self, residual: Tensor, arguments: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return for each term the statistic t, and the share of it that the residual holds.

        t = <R, term> / (|term| rms(R)) is a normal number where the residual R is noise. A share of
        -1 says that the term was dropped, 1 that it was added twice.
        """
        products = self._held(residual, arguments)
        energy = self.energy(arguments)
        rms = residual.double().square().mean().sqrt()
        smallest = torch.finfo(torch.float64).tiny
        t = products / (energy.sqrt() * rms).clamp_min(smallest)
        return t, products / energy.clamp_min(smallest)

    def term(self, index: int, arguments: Sequence[Any]) -> Tensor:
        """Return what one term adds to the result."""
        first, second = (
            arguments[position].double().select(names.index(self.inner), index)
            for position, names in zip(self.positions, (self.first, self.second), strict=True)
        )
        equation = f"{self.first},{self.second}->{self.result}".replace(self.inner, "")
        return torch.einsum(equation, first, second)

    def find_terms(
        self, residual: Tensor, arguments: Sequence[Any], enough: float = 0.0
    ) -> tuple[dict[int, float], float]:
        """Find the terms that a residual holds, their shares, and the energy share of the rest.

        Terms are taken out one at a time, the strongest first, until what is left looks like noise,
        or is at most the share `enough` of the energy.
        """
        shares: dict[int, float] = {}
        remainder = residual.double().clone()
        total = float(remainder.square().sum())
        bound = false_alarm_bound(self.axis.length)
        for _ in range(MOST_TERMS):
            t, share = self.terms(remainder, arguments)
            index = int(t.abs().argmax())
            if not float(t[index].abs()) > bound:
                break
            remainder -= float(share[index]) * self.term(index, arguments)
            shares[index] = shares.get(index, 0.0) + float(share[index])
            if float(remainder.square().sum()) <= enough * total:
                break
        return shares, float(remainder.square().sum()) / total if total else 0.0

    def find_range(
        self, residual: Tensor, arguments: Sequence[Any], share: float
    ) -> tuple[range, float]:
        """Find the terms in a row that, times a share, are nearest to a residual; and the rest.

        The rest is an energy. Sums over all ranges follow from the terms' scalar products.
        """
        length = self.axis.length
        sums = torch.nn.functional.pad(self._held(residual, arguments).cumsum(0), (1, 0))
        overlaps = self._overlaps(arguments)
        areas = torch.nn.functional.pad(overlaps.cumsum(0).cumsum(1), (1, 0, 1, 0))
        corner = areas.diagonal()
        energy = corner[None, :] + corner[:, None] - areas - areas.T
        rest = share * share * energy - 2 * share * (sums[None, :] - sums[:, None])
        upper = torch.ones(length + 1, length + 1, dtype=torch.bool).triu(1)
        rest = torch.where(upper.to(rest.device), rest, torch.inf)
        start, end = divmod(int(rest.argmin()), length + 1)
        return range(start, end), float(residual.double().square().sum() + rest[start, end])

    def solve_shares(self, residual: Tensor, arguments: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Solve for the shares of all terms at once; return them and what they do not explain."""
        held = self._held(residual, arguments)
        shares = torch.linalg.lstsq(self._overlaps(arguments), held[:, None]).solution.reshape(-1)
        first, second = (arguments[position].double() for position in self.positions)
        equation = f"{self.inner},{self.first},{self.second}->{self.result}"
        return shares, residual.double() - torch.einsum(equation, shares, first, second)

    def _held(self, residual: Tensor, arguments: Sequence[Any]) -> Tensor:
        """Return the scalar product of a residual with each term."""
        first, second = (arguments[position].double() for position in self.positions)
        equation = f"{self.result},{self.first},{self.second}->{self.inner}"
        return torch.einsum(equation, residual.double(), first, second)

    def _overlaps(self, arguments: Sequence[Any]) -> Tensor:
        """Return the scalar product of each pair of terms."""
        length = self.axis.length
        first, second = (arguments[position].double() for position in self.positions)
        products = self._scalar_products(first, self.first) * self._scalar_products(
            second, self.second
        )
        return products.reshape(-1, length, length).sum(0)

    def _scalar_products(self, argument: Tensor, names: str) -> Tensor:
        """Multiply each pair of an argument's terms, for each entry of the dimensions in common."""
        common = "".join(sorted(set(self.first) & set(self.second) - {self.inner}))
        unused = next(letter for letter in string.ascii_letters if letter not in names + common)
        partner = names.replace(self.inner, unused)
        return torch.einsum(f"{names},{partner}->{common}{self.inner}{unused}", argument, argument)

    def smallest_share(self, arguments: Sequence[Any], room: Tensor) -> float:
        """Return the share of the weakest term whose loss is more than the room of bounds."""
        inner_first = []
        for position, names in zip(self.positions, (self.first, self.second), strict=True):
            argument = arguments[position].double().abs()
            terms = argument.movedim(names.index(self.inner), 0)
            inner_first.append(terms.reshape(len(terms), -1).amax(1))
        largest = inner_first[0] * inner_first[1]
        return (
            float((room.median() / largest[largest > 0]).max())
            if bool((largest > 0).any())
            else 0.0
        )


def find_product(
    arguments: Sequence[Any], axes: Sequence[CutAxis], values: Tensor
) -> Product | None:
    """Return the product of two arguments that `values` are, None for another function."""
    for inner in (axis for axis in axes if axis.is_inner):
        positions = sorted({position for position, _ in inner.dimensions})
        if len(positions) != 2 or len(inner.dimensions) != 2:
            continue
        letters = iter(string.ascii_letters)
        names = {
            dimension: name
            for axis, name in zip(axes, letters, strict=False)
            for dimension in axis.dimensions
        }
        result = ["" for _ in values.shape]
        for axis in axes:
            is_of_both = any(position in positions for position, _ in axis.dimensions)
            if axis.output is not None and is_of_both:
                result[axis.output] = names[axis.dimensions[0]]
        first, second = (
            "".join(
                names.setdefault((position, dim), next(letters))
                for dim in range(arguments[position].dim())
            )
            for position in positions
        )
        product = Product(
            (positions[0], positions[1]),
            first,
            second,
            "".join(result),
            names[inner.dimensions[0]],
            inner,
        )
        if _explains(product, arguments, values):
            return product
    return None


def _explains(product: Product, arguments: Sequence[Any], values: Tensor) -> bool:
    """Check that the product gives the values, but for one vector that is added to every row."""
    operands = [arguments[position] for position in product.positions]
    if len(product.result) != values.dim() or not all(x.is_floating_point() for x in operands):
        return False
    first, second = (operand.double() for operand in operands)
    try:
        sums = torch.einsum(f"{product.first},{product.second}->{product.result}", first, second)
    except RuntimeError:
        return False
    if sums.shape != values.shape:
        return False
    offsets = (values - sums).reshape(-1, values.shape[-1] if values.dim() else 1)
    if len(offsets) > 1:  # the offset of one row would explain any function
        offsets = offsets - offsets.mean(0, keepdim=True)
    return float(offsets.square().sum()) <= 1e-16 * float(values.square().sum())


def false_alarm_bound(count: int, sites: int = 10_000) -> float:
    """Return the |t| that noise exceeds at one in `sites` sites with `count` terms each."""
    normal = torch.distributions.Normal(0.0, 1.0)
    tail = torch.tensor(0.5 / (count * sites), dtype=torch.float64)
    return -float(normal.icdf(tail))
