"""The slow definition of a step of a tensor core and of float32 rounding, in exact fractions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

Rounding = Callable[[Fraction], int]


def toward_zero(x: Fraction) -> int:
    return math.trunc(x)


def to_nearest(x: Fraction) -> int:
    return round(x)


def downward(x: Fraction) -> int:
    return math.floor(x)


def exponent(x: Fraction) -> int:
    """Return the largest e with 2**e <= |x|."""
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= abs(x) else e - 1


def quantized(x: Fraction, quantum: int, rounding: Rounding) -> Fraction:
    """Round to multiples of 2**quantum."""
    step = Fraction(2) ** quantum
    return rounding(x / step) * step


def float32(x: Fraction) -> Fraction:
    """Round to the nearest float32, ties to even; overflow is not looked at."""
    if not x:
        return x
    return quantized(x, max(exponent(x), -126) - 23, to_nearest)


def chained(
    a: Sequence[float], b: Sequence[float], group: int, aligned: int, fraction: int,
    least: tuple[int, int], start: float = 0.0, rounding: Rounding = toward_zero,
) -> Fraction:  # fmt: skip
    """Return the accumulator of one chain over two rows of numbers."""
    total = Fraction(start)
    pairs = [(Fraction(x), Fraction(y)) for x, y in zip(a, b, strict=True)]
    for first_pair in range(0, len(pairs), group):
        step = [(x, y) for x, y in pairs[first_pair : first_pair + group] if x and y]
        exponents = [max(exponent(x), least[0]) + max(exponent(y), least[1]) for x, y in step]
        if total:
            exponents.append(exponent(total))
        if not exponents:
            continue
        quantum = max(exponents) - aligned
        terms = [*(x * y for x, y in step), total]
        total = sum((quantized(term, quantum, rounding) for term in terms), Fraction(0))
        if total:
            total = quantized(total, exponent(total) - fraction, rounding)
    return total
