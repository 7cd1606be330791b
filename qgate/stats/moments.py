"""Moments of values from exact sums of their powers, whatever the order and the parts.

Sums are whole numbers of a power of two, so statistics of shards add up to the bits of one pass.
"""

from __future__ import annotations

import math
import threading

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_DIGITS = 53
_NARROW = 11
"""The most digits of a 16-bit number."""
_SPLIT = 22
_PIECE = 2**15  # float64 work on so many values stays in the cache, and in one thread
# Between these, fourth powers of float64 numbers neither overflow nor vanish; float32 ends there.
_TAME = (1e-60, 1e60)


def _whole(value: float) -> tuple[int, int]:
    """Split a finite number into a whole number and a power of two."""
    part, power = math.frexp(value)
    return int(math.ldexp(part, _DIGITS)), power - _DIGITS


class ExactSum:
    """A whole number of units of a power of two, the smallest one so far."""

    __slots__ = ("_units", "exponent")

    def __init__(self) -> None:
        self._units = self.exponent = 0

    def add(self, value: float, exponent: int = 0) -> None:
        """Add a finite number times 2^exponent."""
        units, power = _whole(value)
        self.take(units, power + exponent)

    def merge(self, other: ExactSum) -> None:
        self.take(other._units, other.exponent)

    def take(self, units: int, exponent: int) -> None:
        """Add a whole number times 2^exponent."""
        if not units:
            return
        if exponent < self.exponent:
            self._units <<= self.exponent - exponent
            self.exponent = exponent
        self._units += units << (exponent - self.exponent)

    def value(self) -> float:
        """Return the nearest float64 number."""
        power = self.exponent
        return self._units / (1 << -power) if power < 0 else float(self._units << power)

    def units(self, exponent: int) -> int:
        """Return it in units of 2^exponent, an exponent that is not above its own."""
        return self._units << (self.exponent - exponent)


class PowerSums:
    """Exact sums of n values and of their powers, up to the second or the fourth."""

    def __init__(self, order: int = 4) -> None:
        self.n = 0
        self.powers = [ExactSum() for _ in range(order)]

    @staticmethod
    def about(n: int, center: float, sums: list[float], exponent: int = 0) -> PowerSums:
        """Build from sums of powers of n distances from a center, in units of 2^exponent."""
        total = PowerSums(len(sums))
        total.n = n
        center_units, power = _whole(center)
        distances = [(n, 0), *map(_whole, sums)]
        for k, powers in enumerate(total.powers, 1):
            for j in range(k + 1):
                units, own = distances[j]
                powers.take(
                    math.comb(k, j) * center_units ** (k - j) * units,
                    power * (k - j) + own + k * exponent,
                )
        return total

    @staticmethod
    def of_figures(n: int, mean: float, std: float) -> PowerSums:
        """Build from the mean and the standard deviation of n values."""
        total = PowerSums(2)
        total.n = n
        (mean_units, mean_power), (units, power) = _whole(mean), _whole(std)
        total.powers[0].take(n * mean_units, mean_power)
        total.powers[1].take(n * mean_units**2, 2 * mean_power)
        total.powers[1].take(n * units**2, 2 * power)
        return total

    @staticmethod
    def of_counts(values: Floats, weights: Ints, order: int = 4) -> PowerSums:
        """Build from distinct values of 16-bit types, ascending, and how often each occurs."""
        total = PowerSums(order)
        total.n = int(weights.sum())
        if not total.n:
            return total
        parts, exponents = np.frexp(values)
        counts, units = weights, np.ldexp(parts, _NARROW).astype(np.int64)
        if total.n >= 2**40:  # where products of halves and counts would leave int64
            units, counts = units.astype(object), counts.astype(object)
        starts = np.flatnonzero(np.diff(exponents, prepend=exponents[0] - 1))
        powers_of_two = (exponents[starts].astype(np.int64) - _NARROW).tolist()
        power = np.ones_like(units)
        for k, powers in enumerate(total.powers, 1):
            power = power * units
            highs = np.add.reduceat((power >> _SPLIT) * counts, starts).tolist()
            lows = np.add.reduceat((power & (2**_SPLIT - 1)) * counts, starts).tolist()
            for high, low, exponent in zip(highs, lows, powers_of_two, strict=True):
                powers.take((high << _SPLIT) + low, k * exponent)
        return total

    def merge(self, other: PowerSums) -> None:
        """Add the values of another; only powers that both have remain."""
        self.n += other.n
        self.powers = self.powers[: len(other.powers)]
        for mine, theirs in zip(self.powers, other.powers, strict=False):
            mine.merge(theirs)

    def __add__(self, other: PowerSums) -> PowerSums:
        if not isinstance(other, PowerSums):
            return NotImplemented
        total = PowerSums(min(len(self.powers), len(other.powers)))
        total.merge(self)
        total.merge(other)
        return total

    def figures(self) -> dict[str, float]:
        """Return mean, std (of a population), rms, skew, and the kurtosis less three.

        The last two exist only for values that are not constant.
        """
        n = self.n
        if not n:
            return {}
        unit = min(power.exponent // k for k, power in enumerate(self.powers, 1))
        a, b, *higher = (power.units(k * unit) for k, power in enumerate(self.powers, 1))
        second = max(n * b - a * a, 0)
        figures = {
            "mean": _root(a * a, n * n, unit) * (-1 if a < 0 else 1),
            "std": _root(second, n * n, unit),
            "rms": _root(b, n, unit),
        }
        if second and higher:
            c, d = higher
            third = n * n * c - 3 * n * a * b + 2 * a**3
            fourth = n**3 * d - 4 * n * n * a * c + 6 * n * a * a * b - 3 * a**4
            figures["skew"] = _root(third**2, second**3, 0) * (-1 if third < 0 else 1)
            figures["kurtosis"] = (fourth - 3 * second**2) / second**2
        return figures


def _root(above: int, below: int, exponent: int) -> float:
    """Return the square root of above / below, times 2^exponent; infinite beyond float64."""
    if not above:
        return 0.0
    half = (above.bit_length() - below.bit_length()) // 2
    near = above / (below << 2 * half) if half >= 0 else (above << -2 * half) / below
    try:
        return math.ldexp(math.sqrt(near), half + exponent)
    except OverflowError:
        return math.inf


class _Scratch(threading.local):
    """Reused memory: fresh pages cost more than the work in them."""

    def __init__(self) -> None:
        self.rooms = torch.empty(2, _PIECE, dtype=torch.float64, device="cpu").unbind()


_scratch = _Scratch()


class PowerPass:
    """Sums of powers of distances from a center, of the parts of a wide tensor, in float64.

    The center is the mean of the first piece, which is so near to the mean of all that sums of
    powers about it lose no digits. Where powers of values up to `amax` would leave float64, they
    are in units of a power of two.
    """

    def __init__(self, amax: float = 0.0, order: int = 4) -> None:
        self._exponent = 0 if is_tame(amax) else math.frexp(amax)[1]
        self._n, self._center = 0, 0.0
        self._sums = [0.0] * order

    def take(self, part: Tensor) -> None:
        """Add the values of a part, which are finite."""
        for piece in part.reshape(-1).split(_PIECE) if part.numel() else ():
            count = piece.numel()  # `len` of a tensor costs as much as a sum of few values
            near, square = _scratch.rooms
            if count < _PIECE:
                near, square = near[:count], square[:count]
            near.copy_(piece)
            if self._exponent:
                np.ldexp(near.numpy(), -self._exponent, out=near.numpy())
            if not self._n:
                self._center = float(near.mean())
            near.sub_(self._center)
            torch.mul(near, near, out=square)
            sums = [near.sum(), square.sum()]
            if len(self._sums) > 2:
                sums += [torch.dot(near, square), torch.dot(square, square)]
            self._sums = [a + float(b) for a, b in zip(self._sums, sums, strict=True)]
            self._n += count

    def moments(self) -> PowerSums:
        return PowerSums.about(self._n, self._center, self._sums, self._exponent)


def is_tame(amax: float) -> bool:
    """Tell if fourth powers of values up to this magnitude stay within float64."""
    return not amax or _TAME[0] < amax < _TAME[1]
