"""Criteria of comparisons, evaluated on arrays: closeness of elements, and sums over tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from qgate.audits.reading import Values


class ProductSums(NamedTuple):
    """Sums of x², y² and xy of each group of elements that gives one number."""

    xx: Values
    yy: Values
    xy: Values

    @classmethod
    def of(cls, x: Values, y: Values) -> ProductSums:
        """Sum over the last axis."""
        return cls(*(np.einsum("...i,...i->...", a, b) for a, b in ((x, x), (y, y), (x, y))))

    def plus(self, others: ProductSums, weight: float) -> ProductSums:
        return ProductSums(*(a + weight * b for a, b in zip(self, others, strict=True)))


@dataclass(frozen=True)
class Closeness:
    """Elementwise closeness: abs(x - y) <= atol + rtol * abs(y); `either` takes the larger term."""

    rtol: float
    atol: float
    either: bool = False

    @property
    def exact(self) -> bool:
        return self.rtol == 0 and self.atol == 0

    def accepts(self, x: Values, y: Values) -> bool:
        relative = self.rtol * np.abs(y)
        room = np.maximum(relative, self.atol) if self.either else relative + self.atol
        return bool((np.abs(x - y) <= room).all())


@dataclass(frozen=True)
class Similarity:
    """Judgment of a number made of product sums, such as a cosine, by what the test asserts.

    measure   the name of the number: a key of MEASURES
    asserted  tells if the test would have passed with another number
    axis      the dimension along which cosines are taken, None for all elements at once
    shape     the shape of the result, where it has one number for each group
    """

    measure: str
    asserted: Callable[[Any], bool]
    axis: int | None = None
    shape: tuple[int, ...] = ()

    def accepts(self, sums: ProductSums) -> bool:
        return self.asserted(self.value(sums))

    def value(self, sums: ProductSums) -> Any:
        """Return the number, or one for each group."""
        values = MEASURES[self.measure](sums)
        return values.reshape(self.shape) if self.shape else float(values.reshape(-1)[0])

    def distance(self, sums: ProductSums) -> float:
        """Return how far from equal tensors the worst group is: zero for equal ones."""
        return float(np.max(DISTANCES[self.measure](MEASURES[self.measure](sums))))


def _cosine(sums: ProductSums) -> Values:
    norms = np.sqrt(np.maximum(sums.xx * sums.yy, 0.0))
    return np.where(norms > 0, sums.xy / np.maximum(norms, 1e-300), 0.0)


def _calc_diff(sums: ProductSums) -> Values:
    total = sums.xx + sums.yy
    return 1 - np.where(total > 0, 2 * sums.xy / np.maximum(total, 1e-300), 1.0)


def _sqnr(sums: ProductSums) -> Values:
    error = np.maximum(sums.xx + sums.yy - 2 * sums.xy, 1e-300)
    return np.asarray(10 * np.log10(np.maximum(sums.xx, 1e-300) / error))


MEASURES: dict[str, Callable[[ProductSums], Values]] = {
    "cosine": _cosine,
    "calc_diff": _calc_diff,
    "sqnr": _sqnr,
}
"""Numbers that a test asserts, from product sums; of sqnr, x is the reference."""

DISTANCES: dict[str, Callable[[Values], Values]] = {
    "cosine": lambda value: 1 - value,
    "calc_diff": lambda value: value,
    "sqnr": lambda value: np.asarray(10.0 ** (-value / 10)),
}
"""The same numbers as distances, zero for equal tensors."""
