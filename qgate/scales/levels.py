"""Scale exponents of a sweep: the ends of the range, the best power of two, the usual scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from qgate.errors import QgateError
from qgate.formats import ElementFormat

_FARTHEST = 1000
_E8M0 = 127
_LARGEST = float(np.finfo(np.float32).max)
Alignment = Literal["exact", "documented"]
UsualKind = Literal["production", "amax", "cast"]


@dataclass(frozen=True)
class Level:
    exponent: float
    marks: tuple[str, ...] = ()
    """Among "maximum", "minimum" (the alignment ends) and the kind of the usual scale."""
    scale: float | None = None
    """The scale, where it is not exactly 2**exponent."""

    @property
    def integer(self) -> bool:
        return float(self.exponent).is_integer()

    @property
    def factor(self) -> float:
        return float(np.exp2(self.exponent)) if self.scale is None else self.scale


@dataclass(frozen=True)
class Usual:
    """The usual scale of a format, which advice is compared with.

    production  the exponent that MX's floor rule gives, of formats with E8M0 scales
    amax        amax / max, as a number: fp8 and integers with a scale of the tensor
    cast        1: formats that are cast as they are
    """

    kind: UsualKind
    scale: float

    @property
    def exponent(self) -> float:
        return math.log2(self.scale)


@dataclass(frozen=True)
class MeetingExponents:
    """The exponents at which the largest and the smallest magnitude meet the format's limits."""

    maximum: float
    minimum: float
    alignment: str


def floor_log2_ratio(a: float, b: float) -> int:
    """Return floor(log2(a / b)) without computing a logarithm or the quotient."""
    a_fraction, a_exponent = math.frexp(a)
    b_fraction, b_exponent = math.frexp(b)
    return a_exponent - b_exponent - (a_fraction < b_fraction)


def ceil_log2_ratio(a: float, b: float) -> int:
    """Return ceil(log2(a / b)), likewise."""
    a_fraction, a_exponent = math.frexp(a)
    b_fraction, b_exponent = math.frexp(b)
    return a_exponent - b_exponent + (a_fraction > b_fraction)


def usual_of(fmt: ElementFormat, amax: float, *, mx: bool, double: bool) -> Usual:
    """Return the usual scale of a format for a tensor; `mx` for elements of an MX format."""
    if mx:
        exponent = floor_log2_ratio(amax, 1.0) - fmt.max_exponent
        return Usual("production", 2.0 ** min(max(exponent, -_E8M0), _E8M0))
    if fmt.tapered or fmt.bits > 8:
        return Usual("cast", 1.0)
    scale = amax / fmt.max if double else float(np.float32(min(amax, _LARGEST) / fmt.max))
    return Usual("amax", max(scale, 2.0**-1022 if double else 2.0**-149))


def ends_of(
    amax: float,
    amin: float,
    limits: tuple[float, float],
    max_exp: float | None,
    min_exp: float | None,
    alignment: Alignment,
) -> MeetingExponents:
    """Return the exponents at which a tensor meets a format's largest and smallest normal value.

    "exact" goes from the smallest scale at which nothing overflows to the
    largest at which nothing underflows. "documented" rounds both ends the other way.
    """
    largest, smallest = limits
    if alignment == "documented":
        high: float = floor_log2_ratio(amax, largest)
        low: float = ceil_log2_ratio(amin, smallest)
    else:
        high, low = ceil_log2_ratio(amax, largest), floor_log2_ratio(amin, smallest)
    if max_exp is not None and min_exp is not None and max_exp < min_exp:
        raise QgateError(
            f"max_exp {max_exp:g} is below min_exp {min_exp:g}; a sweep runs from the larger "
            "scale exponent to the smaller one."
        )
    for name, value in (("max_exp", max_exp), ("min_exp", min_exp)):
        if value is not None and not abs(value) <= _FARTHEST:
            raise QgateError(
                f"{name} {value} is not allowed; it is a number from -{_FARTHEST} to {_FARTHEST}."
            )
    if max_exp is not None and min_exp is not None:
        return MeetingExponents(max_exp, min_exp, "given")
    # The other end gives way where the given one lies beyond it.
    if max_exp is not None:
        return MeetingExponents(max_exp, min(low, math.floor(max_exp)), "maximum given")
    if min_exp is not None:
        return MeetingExponents(max(high, math.ceil(min_exp)), min_exp, "minimum given")
    return MeetingExponents(high, low, alignment)


def levels_of(ends: MeetingExponents, count: int, usual: Usual, best: int) -> list[Level]:
    """Return `count` evenly spaced levels, the integers between, and the usual scale; descending.

    The integers go on to one beyond the best power of two, but never beyond a given end. A tensor
    with few binades can lie within the format at many scales; then the scale at which its largest
    value would overflow is below the one at which its smallest would underflow.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise QgateError(f"levels {count!r} is not allowed; it is a whole number from 1.")
    high, low = max(ends.maximum, ends.minimum), min(ends.maximum, ends.minimum)
    spaced = np.linspace(high, low, count).tolist() if count > 1 else [high]
    first, last = low, high
    # One more, so that a curve shows that it was the best one.
    if best < low and ends.alignment not in ("given", "minimum given"):
        first = best - 1
    if best > high and ends.alignment not in ("given", "maximum given"):
        last = best + 1
    between = {*range(math.ceil(first), math.floor(last) + 1)}
    if not between & {*range(-_E8M0, _E8M0 + 1)}:
        # Numbers that no E8M0 scale reaches: how bad the nearest one is has to be seen.
        between.add(min(max(best, -_E8M0), _E8M0))
    marks = {"maximum": ends.maximum, "minimum": ends.minimum, usual.kind: usual.exponent}
    levels = {
        e: Level(e, tuple(name for name, exponent in marks.items() if e == exponent))
        for e in {*spaced, *map(float, between), usual.exponent}
    }
    if not levels[usual.exponent].integer:
        levels[usual.exponent] = replace(levels[usual.exponent], scale=usual.scale)
    return [levels[e] for e in sorted(levels, reverse=True)]
