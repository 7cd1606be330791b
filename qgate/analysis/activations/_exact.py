"""Sums of float64 numbers without any rounding on the way.

They are the same for any order and any parts, so that statistics of shards add up to the bits of
one pass, whoever made them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from qgate.analysis.portraits._reading import Sums

_DIGITS = 53
_FAR = 300


class ExactSum:
    """A whole number of units of a power of two, the smallest that was needed so far."""

    __slots__ = ("_exponent", "_units")

    def __init__(self) -> None:
        self._units = self._exponent = 0

    def add(self, value: float, exponent: int = 0) -> None:
        """A finite number times 2^exponent."""
        part, power = math.frexp(value)
        self._take(int(math.ldexp(part, _DIGITS)), power - _DIGITS + exponent)

    def merge(self, other: ExactSum) -> None:
        self._take(other._units, other._exponent)

    def _take(self, units: int, exponent: int) -> None:
        if not units:
            return
        if exponent < self._exponent:
            self._units <<= self._exponent - exponent
            self._exponent = exponent
        self._units += units << (exponent - self._exponent)

    def value(self, exponent: int = 0) -> float:
        """The nearest float64 number, in units of 2^exponent."""
        power = self._exponent - exponent
        return self._units / (1 << -power) if power < 0 else float(self._units << power)

    @property
    def size(self) -> int:
        """The power of two above its magnitude."""
        return self._units.bit_length() + self._exponent if self._units else 0


@dataclass
class ExactSums:
    """Of n values and of their squares."""

    n: int = 0
    total: ExactSum = field(default_factory=ExactSum)
    square: ExactSum = field(default_factory=ExactSum)

    def add(self, found: Sums) -> None:
        self.n += found.n
        self.total.add(found.total, found.exponent)
        self.square.add(found.square, 2 * found.exponent)

    def merge(self, other: ExactSums) -> None:
        self.n += other.n
        self.total.merge(other.total)
        self.square.merge(other.square)

    def rounded(self) -> Sums:
        unit = self.square.size // 2
        unit = unit if abs(unit) > _FAR else 0
        return Sums(self.n, unit, self.total.value(unit), self.square.value(2 * unit))
