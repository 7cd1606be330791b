"""Sums of float64 numbers without any rounding on the way.

They are the same for any order and any parts, so that statistics of shards add up to the bits of
one pass, whoever made them.
"""

from __future__ import annotations

import math

_DIGITS = 53


def whole(value: float) -> tuple[int, int]:
    """Split a finite number into a whole number and a power of two."""
    part, power = math.frexp(value)
    return int(math.ldexp(part, _DIGITS)), power - _DIGITS


class ExactSum:
    """A whole number of units of a power of two, the smallest that was needed so far."""

    __slots__ = ("_exponent", "_units")

    def __init__(self) -> None:
        self._units = self._exponent = 0

    def add(self, value: float, exponent: int = 0) -> None:
        """A finite number times 2^exponent."""
        units, power = whole(value)
        self.take(units, power + exponent)

    def merge(self, other: ExactSum) -> None:
        self.take(other._units, other._exponent)

    def take(self, units: int, exponent: int) -> None:
        """A whole number times 2^exponent."""
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
    def exponent(self) -> int:
        """The power of two that it is a whole number of."""
        return self._exponent

    def units(self, exponent: int) -> int:
        """How many 2^exponent it is, of an exponent that is not above its own."""
        return self._units << (self._exponent - exponent)
