"""What one pass over pairs of actual and reference leaves behind: the sums metrics read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qgate.errors import QgateError

Floats = npt.NDArray[np.float64]

_SAFE = 2.0**400  # squares between 2^-800 and 2^800 leave room for 2^63 of them, and lose none
_LAST = 1000  # the exponent of the largest scale, and of the smallest: both have a reciprocal


def scale_for(largest: float) -> float:
    """The power of two to divide values by before they are squared: 1 unless they need one.

    float32 and narrower types never need one. It grows with `largest`, so the scale of a union is
    the larger scale of its parts, in whatever order they meet.
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
    sums without error have `max_abs_error` exactly 0: that is what the defined results ask.

    The three scales are powers of two and 1 unless float64 values near the ends of their range were
    squared. Whatever belongs to one side counts in its scale: `mean_actual * scale_actual` is the
    mean, `sum_square_error * scale_error**2` the sum of squares, `co` and `dot` count in
    `scale_actual * scale_reference`. `low_*` is what the mean has beyond the digits of `mean_*`:
    parts whose means are far from zero and near to each other merge by the difference of the means,
    which has few digits left without it. Who builds sums of a whole, of 16-bit or 32-bit values,
    leaves these five alone.
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

    @classmethod
    def from_weighted(
        cls, actual: npt.ArrayLike, reference: npt.ArrayLike, weights: npt.ArrayLike
    ) -> ErrorSums:
        """The sums of pairs that occur `weights` times each: the definition, written out."""
        a, r = np.asarray(actual, np.float64), np.asarray(reference, np.float64)
        w = np.asarray(weights)
        if not a.shape == r.shape == w.shape:
            raise QgateError(
                f"actual {a.shape}, reference {r.shape} and weights {w.shape} differ in shape: "
                "give one weight for each pair."
            )
        a, r, w = a[w > 0], r[w > 0], w[w > 0]
        if not (np.isfinite(a).all() and np.isfinite(r).all()):
            raise QgateError("sums are over finite pairs: count NaN and Inf apart.")
        if not w.size:
            return cls()
        with np.errstate(over="ignore"):
            error, unit = a - r, 1.0
        if not np.isfinite(error).all():
            error, unit = a / 4 - r / 4, 4.0
        scale_actual = scale_for(float(np.abs(a).max()))
        scale_reference = scale_for(float(np.abs(r).max()))
        scale_error = scale_for(float(np.abs(error).max()))
        a, r, error = a / scale_actual, r / scale_reference, error / scale_error
        count, wide = int(w.sum()), w.astype(np.float64)
        mean_a, mean_r = _mean(a, wide), _mean(r, wide)
        return cls(
            count=count,
            mean_actual=mean_a,
            mean_reference=mean_r,
            m2_actual=_sum(wide * (a - mean_a) ** 2),
            m2_reference=_sum(wide * (r - mean_r) ** 2),
            co=_sum(wide * (a - mean_a) * (r - mean_r)),
            sum_square_actual=_sum(wide * a**2),
            sum_square_reference=_sum(wide * r**2),
            dot=_sum(wide * a * r),
            sum_square_error=_sum(wide * error**2),
            sum_abs_error=_sum(wide * np.abs(error)),
            sum_error=_sum(wide * error),
            max_abs_error=float(np.abs(error).max()),
            sum_abs_reference=_sum(wide * np.abs(r)),
            max_abs_reference=float(np.abs(r).max()),
            scale_actual=scale_actual,
            scale_reference=scale_reference,
            scale_error=scale_error * unit,
        )

    def __add__(self, other: ErrorSums) -> ErrorSums:
        """Chan's formula for the centered sums; exactly the same whichever side comes first."""
        if not isinstance(other, ErrorSums):
            return NotImplemented
        if not self.count or not other.count:
            return self if self.count else other
        a, b = sorted(_in_common_scales(self, other), key=_means)
        share = a.count * (b.count / (a.count + b.count))
        by_actual = (b.mean_actual - a.mean_actual) + (b.low_actual - a.low_actual)
        by_reference = (b.mean_reference - a.mean_reference) + (b.low_reference - a.low_reference)
        part = a.count / (a.count + b.count)
        mean_actual, low_actual = _moved(b.mean_actual, b.low_actual, -by_actual * part)
        mean_reference, low_reference = _moved(
            b.mean_reference, b.low_reference, -by_reference * part
        )
        return ErrorSums(
            a.count + b.count,
            mean_actual,
            mean_reference,
            a.m2_actual + b.m2_actual + by_actual * by_actual * share,
            a.m2_reference + b.m2_reference + by_reference * by_reference * share,
            a.co + b.co + by_actual * by_reference * share,
            a.sum_square_actual + b.sum_square_actual,
            a.sum_square_reference + b.sum_square_reference,
            a.dot + b.dot,
            a.sum_square_error + b.sum_square_error,
            a.sum_abs_error + b.sum_abs_error,
            a.sum_error + b.sum_error,
            max(a.max_abs_error, b.max_abs_error),
            a.sum_abs_reference + b.sum_abs_reference,
            max(a.max_abs_reference, b.max_abs_reference),
            a.scale_actual,
            a.scale_reference,
            a.scale_error,
            low_actual,
            low_reference,
        )


def merged_sums(parts: list[tuple[int, ErrorSums]]) -> ErrorSums:
    """The total of what `pushed` has left, the smallest parts first."""
    total = ErrorSums()
    for _, part in reversed(parts):
        total = total + part
    return total


def pushed(parts: list[tuple[int, ErrorSums]], part: ErrorSums) -> None:
    """Merge parts of one size, as a binary counter carries: rounding grows with the logarithm of
    their number."""
    level = 0
    while parts and parts[-1][0] == level:
        part = parts.pop()[1] + part
        level += 1
    parts.append((level, part))


def _mean(x: Floats, weights: Floats) -> float:
    """The mean, exactly the value where all values are equal: a constant has no variance."""
    first = float(x[0])
    return first if bool((x == first).all()) else _sum(weights * x) / _sum(weights)


def _sum(x: Floats) -> float:
    return math.fsum(x.tolist())


def _means(s: ErrorSums) -> tuple[int | float, ...]:
    """An order to add in; sums that are equal in it give the same result in either."""
    return s.count, s.mean_actual, s.low_actual, s.mean_reference, s.low_reference


def _moved(mean: float, low: float, by: float) -> tuple[float, float]:
    """mean + low + by, again as a float64 number and what it leaves out."""
    total = mean + by
    back = total - mean
    return total, low + ((mean - (total - back)) + (by - back))


def _in_common_scales(a: ErrorSums, b: ErrorSums) -> tuple[ErrorSums, ErrorSums]:
    """Both in the larger scale of each side; a side that is all zero has none to speak of."""
    if a.scales == b.scales:
        return a, b
    scales = {}
    for side in ("actual", "reference", "error"):
        zero = f"max_abs_{side}" if side == "error" else f"sum_square_{side}"
        name = f"scale_{side}"
        held = [getattr(each, name) for each in (a, b) if getattr(each, zero) != 0]
        scales[name] = max(held, default=1.0)
    return _scaled(a, **scales), _scaled(b, **scales)


def _scaled(s: ErrorSums, **scales: float) -> ErrorSums:
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
    "mean_actual": ("actual",),
    "mean_reference": ("reference",),
    "low_actual": ("actual",),
    "low_reference": ("reference",),
    "m2_actual": ("actual", "actual"),
    "m2_reference": ("reference", "reference"),
    "co": ("actual", "reference"),
    "sum_square_actual": ("actual", "actual"),
    "sum_square_reference": ("reference", "reference"),
    "dot": ("actual", "reference"),
    "sum_square_error": ("error", "error"),
    "sum_abs_error": ("error",),
    "sum_error": ("error",),
    "max_abs_error": ("error",),
    "sum_abs_reference": ("reference",),
    "max_abs_reference": ("reference",),
}
