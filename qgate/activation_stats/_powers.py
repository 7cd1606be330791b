"""Moments of a stream of tensors: exact sums of powers, whatever the order and the parts."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.activation_stats._exact import ExactSum, whole

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_PIECE = 2**15  # float64 work on so many values stays in the cache
_NARROW = 11
"""Digits that numbers of 16 bits have at most."""


@dataclass(frozen=True)
class Centered:
    """Sums of the first four powers of n distances from a center, in units of 2^exponent."""

    n: int
    center: float
    sums: tuple[float, float, float, float]
    exponent: int = 0


class PowerSums:
    """Exact sums of n values and of their squares, cubes and fourth powers."""

    def __init__(self) -> None:
        self.n = 0
        self.powers = [ExactSum() for _ in range(4)]

    @staticmethod
    def of(part: Centered) -> PowerSums:
        """Take the powers about zero from those about the center, without rounding."""
        made = PowerSums()
        made.n = part.n
        center, power = whole(part.center)
        about = [(part.n, 0), *map(whole, part.sums)]
        for k in range(1, 5):
            for j in range(k + 1):
                units, exponent = about[j]
                made.powers[k - 1].take(
                    math.comb(k, j) * center ** (k - j) * units,
                    power * (k - j) + exponent + k * part.exponent,
                )
        return made

    @staticmethod
    def of_counts(values: Floats, weights: Ints) -> PowerSums:
        """Take distinct 16-bit values and how often each occurs."""
        made = PowerSums()
        made.n = int(weights.sum())
        parts, exponents = np.frexp(values)
        units = np.ldexp(parts, _NARROW).astype(np.int64)
        for exponent in np.unique(exponents).tolist():
            there = exponents == exponent
            own, often = units[there].astype(object), weights[there].astype(object)
            for k, power in enumerate(made.powers, 1):
                power.take(int((own**k * often).sum()), k * (exponent - _NARROW))
        return made

    def merge(self, other: PowerSums) -> None:
        self.n += other.n
        for mine, theirs in zip(self.powers, other.powers, strict=True):
            mine.merge(theirs)

    def moments(self) -> dict[str, float]:
        """Return mean, standard deviation as a population, root mean square, skew, and the
        kurtosis less three; the last two only of what is not constant."""
        n = self.n
        if not n:
            return {}
        unit = min(power.exponent // k for k, power in enumerate(self.powers, 1))
        a, b, c, d = (power.units(k * unit) for k, power in enumerate(self.powers, 1))
        second = max(n * b - a * a, 0)
        found = {
            "mean": _root(a * a, n * n, unit) * _sign(a),
            "std": _root(second, n * n, unit),
            "rms": _root(b, n, unit),
        }
        if second:
            third = n * n * c - 3 * n * a * b + 2 * a**3
            fourth = n**3 * d - 4 * n * n * a * c + 6 * n * a * a * b - 3 * a**4
            found["skew"] = _root(third**2, second**3, 0) * _sign(third)
            found["kurtosis"] = (fourth - 3 * second**2) / second**2
        return found


def _sign(units: int) -> int:
    return -1 if units < 0 else 1


def _root(above: int, below: int, exponent: int) -> float:
    """Return the square root of above / below, times 2^exponent."""
    if not above:
        return 0.0
    half = (above.bit_length() - below.bit_length()) // 2
    near = above / (below << 2 * half) if half >= 0 else (above << -2 * half) / below
    return math.ldexp(math.sqrt(near), half + exponent)


class _Scratch(threading.local):
    """Memory that is used again: fresh pages cost more than what is done in them."""

    def __init__(self) -> None:
        self.rooms = torch.empty(2, _PIECE, dtype=torch.float64, device="cpu").unbind()


_scratch = _Scratch()


class PowerPass:
    """Sums of powers of distances from a center, of the parts of a wide table, in float64.

    The center is the mean of the first piece, which is so near to the mean of all that sums of
    powers about it lose no digits.
    """

    def __init__(self, exponent: int = 0) -> None:
        self.exponent, self.n, self.center = exponent, 0, 0.0
        self.sums = [0.0] * 4

    def take(self, part: Tensor) -> None:
        """Add the finite values of a part."""
        for piece in part.reshape(-1).split(_PIECE) if part.numel() else ():
            near, square = (room[: len(piece)] for room in _scratch.rooms)
            near.copy_(piece)
            if self.exponent:
                np.ldexp(near.numpy(), -self.exponent, out=near.numpy())
            if not self.n:
                self.center = float(near.mean())
            near.sub_(self.center)
            torch.mul(near, near, out=square)
            powers = near.sum(), square.sum(), torch.dot(near, square), torch.dot(square, square)
            self.sums = [a + float(b) for a, b in zip(self.sums, powers, strict=True)]
            self.n += len(piece)

    def centered(self) -> Centered:
        first, second, third, fourth = self.sums
        return Centered(self.n, self.center, (first, second, third, fourth), self.exponent)
