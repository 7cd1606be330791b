"""Which scale exponents a sweep visits: the ends of the range, exactly, and what lies between."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from qgate.errors import QgateError

_FARTHEST = 1000
Alignment = Literal["exact", "documented"]


@dataclass(frozen=True)
class Level:
    exponent: float
    marks: tuple[str, ...] = ()
    """Of "maximum", "minimum" (the alignment ends) and "production" (the one MX would use)."""

    @property
    def integer(self) -> bool:
        return float(self.exponent).is_integer()


@dataclass(frozen=True)
class Ends:
    """The exponents at which the largest and the smallest magnitude meet the format's limits."""

    maximum: float
    minimum: float
    production: int
    alignment: str


def floor_log2_ratio(a: float, b: float) -> int:
    """floor(log2(a / b)) without computing a logarithm or the quotient."""
    a_fraction, a_exponent = math.frexp(a)
    b_fraction, b_exponent = math.frexp(b)
    return a_exponent - b_exponent - (a_fraction < b_fraction)


def ceil_log2_ratio(a: float, b: float) -> int:
    """ceil(log2(a / b)), likewise."""
    a_fraction, a_exponent = math.frexp(a)
    b_fraction, b_exponent = math.frexp(b)
    return a_exponent - b_exponent + (a_fraction > b_fraction)


def ends_of(
    amax: float,
    amin: float,
    limits: tuple[float, float, int],
    max_exp: float | None,
    min_exp: float | None,
    alignment: Alignment,
) -> Ends:
    """From the tensor's magnitudes and the format's max, smallest normal and largest exponent.

    "exact" is what the words promise: from the smallest scale at which nothing overflows to the
    largest at which nothing underflows. "documented" rounds both ends the other way.
    """
    largest, smallest, emax = limits
    if alignment == "documented":
        high: float = floor_log2_ratio(amax, largest)
        low: float = ceil_log2_ratio(amin, smallest)
    else:
        high, low = ceil_log2_ratio(amax, largest), floor_log2_ratio(amin, smallest)
    given = {(False, False): alignment, (True, True): "given"}.get(
        (max_exp is not None, min_exp is not None),
        "maximum given" if max_exp is not None else "minimum given",
    )
    if max_exp is not None and min_exp is not None and max_exp < min_exp:
        raise QgateError(
            f"max_exp {max_exp:g} is below min_exp {min_exp:g}; a sweep runs from the larger "
            "scale exponent to the smaller one."
        )
    for name, value in (("max_exp", max_exp), ("min_exp", min_exp)):
        if value is None:
            continue
        if not math.isfinite(value) or abs(value) > _FARTHEST:
            raise QgateError(
                f"{name} {value} is not allowed; it is a number from -{_FARTHEST} to {_FARTHEST}."
            )
    # The other end gives way where the given one lies beyond it.
    if max_exp is not None:
        low = low if min_exp is not None else min(low, math.floor(max_exp))
        high = max_exp
    if min_exp is not None:
        high = high if max_exp is not None else max(high, math.ceil(min_exp))
        low = min_exp
    production = min(max(floor_log2_ratio(amax, 1.0) - emax, -127), 127)
    return Ends(high, low, production, given)


def levels_of(ends: Ends, count: int) -> list[Level]:
    """`count` evenly spaced ones, the integers between, and the production exponent; descending.

    A tensor with few binades can lie within the format at many scales; then the scale at which its
    largest value would overflow is below the one at which its smallest would underflow.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise QgateError(f"levels {count!r} is not allowed; it is a whole number from 1.")
    high, low = max(ends.maximum, ends.minimum), min(ends.maximum, ends.minimum)
    spaced = np.linspace(high, low, count).tolist() if count > 1 else [high]
    between = range(math.ceil(low), math.floor(high) + 1)
    exponents = sorted({*spaced, *map(float, between), float(ends.production)}, reverse=True)
    marks = {"maximum": ends.maximum, "minimum": ends.minimum, "production": ends.production}
    return [Level(e, tuple(name for name, place in marks.items() if e == place)) for e in exponents]
