"""The sums over pairs of actual and reference that metrics are computed from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

_SAFE = 2.0**400  # squares between 2^-800 and 2^800 leave room for 2^63 of them, and lose none
_LAST = 1000  # the exponent of the largest scale, and of the smallest: both have a reciprocal


def scale_for(largest: float) -> float:
    """Return the power of two to divide values by before they are squared, mostly 1.

    float32 and narrower types never need another one. It grows with `largest`, so the scale of a
    union is the larger scale of its parts, in any order.
    """
    if largest == 0 or 1 / _SAFE <= largest <= _SAFE:
        return 1.0
    exponent = math.frexp(largest)[1] - 1
    return math.ldexp(1.0, min(max(exponent, -_LAST), _LAST))


@dataclass(frozen=True, slots=True)
class ErrorSums:
    """Sums over pairs that are finite on both sides; `a + b` are the sums of both.

    An error is actual - reference. `m2_*` are centered: the sum of (x - mean)^2, and `co` the sum
    of (a - mean_actual) * (r - mean_reference). A side without variance has `m2_*` exactly 0, and
    sums without error have `max_abs_error` exactly 0: the defined results of metrics read that.

    The three scales are powers of two and 1 unless float64 values near the ends of their range were
    squared. The sums of one side count in its scale: `mean_actual * scale_actual` is the mean,
    `sum_square_error * scale_error**2` the sum of squares, `co` and `dot` count in
    `scale_actual * scale_reference`. `low_*` is the part of the mean beyond the digits of `mean_*`:
    parts whose means are far from zero and near to each other merge by the difference of the means,
    which has few digits without it. Sums of a whole tensor of 16-bit or 32-bit values need none of
    these five.
    """

    count: int = 0
    mean_actual: float = 0.0
    mean_reference: float = 0.0
    m2_actual: float = 0.0
    m2_reference: float = 0.0
    co: float = 0.0
    sum_square_actual: float = 0.0
    sum_square_reference: float = 0.0
    dot: float = 0.0
    sum_square_error: float = 0.0
    sum_abs_error: float = 0.0
    sum_error: float = 0.0
    max_abs_error: float = 0.0
    sum_abs_reference: float = 0.0
    max_abs_reference: float = 0.0
    scale_actual: float = 1.0
    scale_reference: float = 1.0
    scale_error: float = 1.0
    low_actual: float = 0.0
    low_reference: float = 0.0

    @property
    def scales(self) -> tuple[float, float, float]:
        return self.scale_actual, self.scale_reference, self.scale_error

    def __add__(self, other: ErrorSums) -> ErrorSums:
        """Add by Chan's formula for the centered sums; the order of the sides changes no bit."""
        if not isinstance(other, ErrorSums):
            return NotImplemented
        if not self.count or not other.count:
            return self if self.count else other
        a, b = sorted(_in_common_scales(self, other), key=_ORDER)
        share = a.count * (b.count / (a.count + b.count))
        by_actual = (b.mean_actual - a.mean_actual) + (b.low_actual - a.low_actual)
        by_reference = (b.mean_reference - a.mean_reference) + (b.low_reference - a.low_reference)
        part = a.count / (a.count + b.count)
        mean_actual, low_actual = _move_mean(b.mean_actual, b.low_actual, -by_actual * part)
        mean_reference, low_reference = _move_mean(
            b.mean_reference, b.low_reference, -by_reference * part
        )
        return ErrorSums(
            count=a.count + b.count,
            mean_actual=mean_actual,
            mean_reference=mean_reference,
            m2_actual=a.m2_actual + b.m2_actual + by_actual * by_actual * share,
            m2_reference=a.m2_reference + b.m2_reference + by_reference * by_reference * share,
            co=a.co + b.co + by_actual * by_reference * share,
            max_abs_error=max(a.max_abs_error, b.max_abs_error),
            max_abs_reference=max(a.max_abs_reference, b.max_abs_reference),
            scale_actual=a.scale_actual,
            scale_reference=a.scale_reference,
            scale_error=a.scale_error,
            low_actual=low_actual,
            low_reference=low_reference,
            **{name: getattr(a, name) + getattr(b, name) for name in _PLAIN_SUMS},
        )


def merge_sums(parts: list[tuple[int, ErrorSums]]) -> ErrorSums:
    """Return the total of the parts that `push_sums` made, the smallest first."""
    total = ErrorSums()
    for _, part in reversed(parts):
        total = total + part
    return total


def push_sums(parts: list[tuple[int, ErrorSums]], part: ErrorSums) -> None:
    """Add a part to the list, merging parts of one size as a binary counter carries.

    So rounding grows with the logarithm of their number.
    """
    level = 0
    while parts and parts[-1][0] == level:
        part = parts.pop()[1] + part
        level += 1
    parts.append((level, part))


def _move_mean(mean: float, low: float, by: float) -> tuple[float, float]:
    """Return mean + low + by as a float64 number and the rest beyond its digits."""
    total = mean + by
    back = total - mean
    return total, low + ((mean - (total - back)) + (by - back))


def _in_common_scales(a: ErrorSums, b: ErrorSums) -> tuple[ErrorSums, ErrorSums]:
    """Bring both to the larger scale of each side; the scale of a side of zeros does not count."""
    if a.scales == b.scales:
        return a, b
    scales = {}
    for side in ("actual", "reference", "error"):
        zero = f"max_abs_{side}" if side == "error" else f"sum_square_{side}"
        name = f"scale_{side}"
        used_scales = [getattr(sums, name) for sums in (a, b) if getattr(sums, zero) != 0]
        scales[name] = max(used_scales, default=1.0)
    return _rescale(a, **scales), _rescale(b, **scales)


def _rescale(s: ErrorSums, **scales: float) -> ErrorSums:
    by = {name.removeprefix("scale_"): getattr(s, name) / new for name, new in scales.items()}
    if all(factor == 1 for factor in by.values()):
        return s
    changed: dict[str, Any] = dict(scales)
    for name, factors in _UNITS.items():
        value = getattr(s, name)
        for side in factors:
            value = value * by[side]
        changed[name] = value
    return replace(s, **changed)


_UNITS = {
    f"{name}_{side}": (side,) * power
    for name, power in (("mean", 1), ("low", 1), ("m2", 2), ("sum_square", 2))
    for side in ("actual", "reference")
} | {
    "co": ("actual", "reference"),
    "dot": ("actual", "reference"),
    "sum_square_error": ("error", "error"),
    "sum_abs_error": ("error",),
    "sum_error": ("error",),
    "max_abs_error": ("error",),
    "sum_abs_reference": ("reference",),
    "max_abs_reference": ("reference",),
}
_PLAIN_SUMS = (
    "sum_square_actual", "sum_square_reference", "dot", "sum_square_error", "sum_abs_error",
    "sum_error", "sum_abs_reference",
)  # fmt: skip
# An order to add in; sums that are equal in it give the same result in either.
_ORDER = attrgetter("count", "mean_actual", "low_actual", "mean_reference", "low_reference")
