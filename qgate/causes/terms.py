"""Terms of a product that a result lacks, has twice, or has with another weight, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qgate.expected.products import LONGEST_RANGE, Product


@dataclass(frozen=True)
class TermFault:
    """Terms between the first and the last one, and the share of them that is too much."""

    count: int
    first: int
    last: int
    share: float

    def fault(self, plural: bool) -> str:
        """Say what is wrong with the terms."""
        are = "are" if plural else "is"
        if abs(self.share + 1) < _NEAR:
            return f"{are} missing"
        if abs(self.share - 1) < _NEAR:
            return f"{are} added twice"
        return f"{'have' if plural else 'has'} {1 + self.share:.4g} times the right weight"

    def words(self, one: str, many: str) -> str:
        """Name the terms as `input channel 17 is missing`."""
        if self.count == 1:
            return f"{one} {self.first} {self.fault(plural=False)}"
        if self.count == self.last - self.first + 1:
            return f"{many} {self.first}:{self.last + 1} {self.fault(plural=True)}"
        return f"{self.count} {many}, {self.first} to {self.last}, {self.fault(plural=True)}"


FEWEST_VALUES = 32
"""Values of a result below which some range of terms may look like any residual."""
MOST_WEIGHTS = 512
"""Terms for whose weights a system of equations is solved."""
UNEXPLAINED = 1e-3
"""Share of a residual's energy that weights may leave; by chance they leave half."""
_NEAR = 0.05


def find_range_fault(
    product: Product, residual: Tensor, arguments: Sequence[Any], allowed: float
) -> TermFault | None:
    """Return neighboring terms whose loss or repetition explains a residual.

    This sees a loop that ends early also where the result has too few values to weigh each term.
    """
    if product.axis.length > LONGEST_RANGE or residual.numel() < FEWEST_VALUES:
        return None
    for share in (-1.0, 1.0):
        terms, remainder = product.find_range(residual, arguments, share)
        if remainder <= allowed and len(terms) < product.axis.length:
            return TermFault(len(terms), terms[0], terms[-1], share)
    return None


def find_term_weights(
    product: Product, residual: Tensor, arguments: Sequence[Any]
) -> Tensor | None:
    """Return the weights of all terms of a product that explain a residual."""
    length = product.axis.length
    if length > MOST_WEIGHTS or residual.numel() < 2 * length:
        return None
    shares, remainder = product.solve_shares(residual, arguments)
    if not float(remainder.square().sum()) <= UNEXPLAINED * float(residual.double().square().sum()):
        return None
    return 1 + shares


def find_term_fault(
    product: Product,
    residual: Tensor,
    arguments: Sequence[Any],
    allowed: float,
    enough: float = 0.0,
) -> TermFault | None:
    """Return the fault of terms that explains a residual, but for an energy that is `allowed`.

    Less than the share `enough` of it is not looked into.
    """
    shares, unexplained = product.find_terms(residual, arguments, enough)
    energy = float(residual.double().square().sum())
    if not shares or unexplained * energy > allowed or len(shares) > product.axis.length // 2:
        return None
    share = sum(shares.values()) / len(shares)
    if max(abs(value - share) for value in shares.values()) > _NEAR:
        return None
    return TermFault(len(shares), min(shares), max(shares), share)
