"""The memory layout of blocks and the grid to round to, as plain numbers for the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

Rounding = Literal["even", "away", "zero"]
ROUNDINGS: dict[str, int] = {"even": 0, "away": 1, "zero": 2}
TILE = 4096
_SHORT = 64


@dataclass(frozen=True)
class Tiling:
    """Elements and warps of a program; `tiles` of them one after the other where it reduces."""

    elements: int
    warps: int
    tiles: int = 1


# By what a program does with a tile; measured, as fewer registers keep more programs in flight.
TILINGS = {
    "flat": Tiling(2048, 2),
    "rows": Tiling(4096, 4),
    "long rows": Tiling(2048, 2),
    "columns": Tiling(4096, 4, 8),
    "mx": Tiling(2048, 4),
    "nvfp4": Tiling(1024, 2),
    "choosing": Tiling(1024, 2),
    "hif4": Tiling(4096, 4),
    "mx columns": Tiling(8192, 4),
    "nvfp4 columns": Tiling(8192, 4),
    "hif4 columns": Tiling(8192, 2),
    "largest": Tiling(4096, 4, 8),
}


@dataclass(frozen=True)
class Grid:
    """A format's values: `mantissa` bits after the leading one, fewer below 2**lowest."""

    mantissa: int
    lowest: int
    highest: int
    largest: float
    largest_negative: float
    signed_zero: bool
    rounding: Rounding
    tapered: bool = False
    saturates: bool = True
    to_infinity: bool = False

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers of the grid for programs in float32: a compilation serves all of them.

        They are the smallest power of two with full precision, what takes a power of two to the
        number whose sum rounds at its step, and the largest numbers.
        """
        if not self.is_single:
            return (0.0, 0.0, 0.0, 0.0)
        return (2.0**self.lowest, 2.0 ** (23 - self.mantissa), self.largest, self.largest_negative)

    @property
    def constants(self) -> dict[str, object]:
        """The constants of the casts of single numbers, in the order of their parameters."""
        wide = not self.is_single
        return {
            "ROUNDING": ROUNDINGS[self.rounding],
            "FIXED": self.fixed,
            "SYMMETRIC": self.largest == self.largest_negative,
            "TAPERED": self.tapered,
            "SATURATES": self.saturates,
            "TO_INFINITY": self.to_infinity and not self.saturates,
            "SIGNED_ZERO": self.signed_zero,
            "WIDE": wide,
            "MANTISSA": self.mantissa if wide else 0,
            "LOWEST": self.lowest if wide else 0,
            "LARGEST": self.largest if wide else 0.0,
            "LARGEST_NEGATIVE": self.largest_negative if wide else 0.0,
        }

    @property
    def fixed(self) -> bool:
        """True if all steps are the same, as those of integers."""
        return self.lowest >= self.highest and not self.tapered

    @property
    def is_single(self) -> bool:
        """True if casts can compute in float32, also with a scale."""
        return self.fits_single and self.mantissa <= 10 and self.lowest - self.mantissa > -60

    @property
    def fits_single(self) -> bool:
        """True if sums that round to the grid stay within float32's normal numbers."""
        reach = math.frexp(self.largest)[1] + 2 + 23 - self.mantissa
        return reach < 127 and self.lowest - self.mantissa > -120


@dataclass(frozen=True)
class MemoryLayout:
    """An [outer, length, inner] tensor, cut into runs of `block` along the middle."""

    outer: int
    length: int
    inner: int
    block: int

    @property
    def groups(self) -> int:
        return -(-self.length // self.block)

    @property
    def padded(self) -> int:
        return power_of_two(self.block)

    @property
    def upright(self) -> bool:
        return self.inner > 1

    @property
    def short(self) -> bool:
        """True if a thread holds a whole block that is upright."""
        return self.upright and self.block <= _SHORT

    @property
    def kind(self) -> tuple[bool, bool]:
        """The properties that a kernel is specialized for: upright, and with a short last block."""
        return self.upright, self.length % self.block != 0

    def across(self, tile: int) -> int:
        """Return how many blocks one program takes."""
        room = max(tile // self.padded, 1)
        return min(room, max(power_of_two(self.inner), 16)) if self.upright else room

    def programs(self, tile: int) -> int:
        across = self.across(tile)
        if self.upright:
            return self.outer * self.groups * -(-self.inner // across)
        return -(-self.outer * self.groups // across)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << max(n - 1, 0).bit_length()


def kind_of(dtype: torch.dtype) -> int | None:
    """Return the number of a dtype in the programs, None without one."""
    return {"torch.bfloat16": 0, "torch.float16": 1, "torch.float32": 2}.get(str(dtype))
