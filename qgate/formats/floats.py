"""Floating point by field widths: FP8, FP6, FP4, fp16, bf16, and the scale types E8M0 and E6M2."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from qgate.formats._element import ElementFormat
from qgate.formats._work import DOUBLE, WorkType
from qgate.formats.options import Floats, Rounding

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from qgate.formats._work import ChunkDraws


@dataclass(frozen=True)
class FloatFormat(ElementFormat):
    """Sign, exponent and mantissa fields.

    `specials` says which codes are no finite numbers: "ieee" keeps the whole last exponent for Inf
    and NaN, "nan" only its last code for NaN (E4M3 and the scale types), "fnuz" has a NaN in place
    of -0 and no Inf, "none" has neither. "extended" (P3109) has one NaN, in place of -0 or as the
    last unsigned code, and Inf as the last code of each sign before it.
    """

    exponent_bits: int
    mantissa_bits: int
    specials: Literal["ieee", "nan", "fnuz", "extended", "none"]
    bias: int
    signed: bool = True
    subnormals: bool = True

    @property
    def bits(self) -> int:
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def layout(self) -> str:
        return f"{int(self.signed)}-{self.exponent_bits}-{self.mantissa_bits}"

    @property
    def mantissa(self) -> int:
        return self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        return (1 if self.subnormals else 0) - self.bias

    @property
    def min_normal(self) -> float:
        return float(2.0**self.min_exponent)

    @cached_property
    def largest_code(self) -> int:
        """The code of the largest value, of which some codes above it are no finite numbers."""
        above = {"ieee": 2**self.mantissa_bits, "nan": 1, "extended": 2 - self.signed}
        codes = 2 ** (self.exponent_bits + self.mantissa_bits)
        return int(codes - 1 - above.get(self.specials, 0))

    @property
    def max_exponent(self) -> int:
        """The exponent of the last binade that has a number."""
        return (self.largest_code >> self.mantissa_bits) - self.bias

    @cached_property
    def max(self) -> float:
        fraction = (self.largest_code % 2**self.mantissa_bits) * 2.0**-self.mantissa_bits
        return float((1 + fraction) * 2.0**self.max_exponent)

    @property
    def min_subnormal(self) -> float:
        return self.min_normal * (2.0**-self.mantissa_bits if self.subnormals else 1.0)

    @property
    def has_inf(self) -> bool:
        return self.specials in ("ieee", "extended")

    @property
    def nan_code(self) -> int | None:
        half = 2 ** (self.exponent_bits + self.mantissa_bits)
        if self.specials == "none":
            return None
        if self.specials == "ieee":
            return int(half - 2 ** (self.mantissa_bits - 1))
        return int(half if self._nan_for_negative_zero else half - 1)

    @property
    def _nan_for_negative_zero(self) -> bool:
        return self.signed and self.specials in ("fnuz", "extended")

    @property
    def negative_zero(self) -> int | None:
        has_one = self.signed and self.subnormals and not self._nan_for_negative_zero
        return 2 ** (self.exponent_bits + self.mantissa_bits) if has_one else None

    @property
    def notes(self) -> str:
        return {
            "ieee": "Inf and NaN",
            "nan": "no Inf, one NaN",
            "fnuz": "no Inf, one NaN, one zero",
            "extended": "Inf, one NaN, one zero",
            "none": "no Inf, no NaN",
        }[self.specials]

    def bounds(self, *, narrow: bool = True) -> tuple[float, float]:
        del narrow
        return (-self.max if self.signed or not self.subnormals else 0.0), self.max

    def is_even(self, largest: float, step: float) -> bool:
        return super().is_even(largest, step) if self.mantissa_bits else self.largest_code % 2 == 0

    def to_grid(
        self,
        x: Tensor,
        work: WorkType,
        rounding: Rounding,
        generator: Generator | ChunkDraws | None = None,
    ) -> Tensor:
        y = super().to_grid(x, work, rounding, generator)
        even = rounding == "even" and not self.mantissa_bits
        return self._ties_to_even_codes(x, y, work) if even else y

    def _ties_to_even_codes(self, x: Tensor, y: Tensor, work: WorkType) -> Tensor:
        """Move ties above an even code down, all of which went up.

        Without mantissa bits evenness alternates with the exponent.
        """
        field = y.view(work.integer).bitwise_and(work.exponent_mask) >> work.mantissa
        is_tie = (x.abs() * 4 == y.abs() * 3) & (x.abs() >= self.min_normal)
        down = is_tie & ((field - work.bias + self.bias) % 2 == 1)
        return y.where(~down, y / 2)

    def code_values(self) -> Floats:
        return _code_values(self)

    def inverse_quantum(self, x: Tensor, work: WorkType) -> Tensor:
        bits = x.view(work.integer).bitwise_and(work.exponent_mask)
        # With less than two bits the inverse at Inf would be zero.
        most = None if self.mantissa > 1 else (2 * work.bias - 1) << work.mantissa
        bits.clamp_(min=(self.min_exponent + work.bias) << work.mantissa, max=most)
        return bits.neg_().add_((2 * work.bias + self.mantissa) << work.mantissa).view(work.dtype)


@lru_cache(maxsize=64)
def _code_values(fmt: FloatFormat) -> Floats:
    m, e = fmt.mantissa_bits, fmt.exponent_bits
    codes = np.arange(2**fmt.bits, dtype=np.int64)
    fraction = codes & (2**m - 1)
    field = (codes >> m) & (2**e - 1)
    negative = (codes >> (m + e)) & 1
    tiny = (field == 0) & fmt.subnormals
    significand = np.where(tiny, 0, 2**m) + fraction
    values = np.ldexp(significand.astype(np.float64), np.where(tiny, 1, field) - fmt.bias - m)
    top = field == 2**e - 1
    if fmt.specials == "ieee":
        values[top] = np.where(fraction[top] == 0, np.inf, np.nan)
    elif fmt.specials == "nan":
        values[top & (fraction == 2**m - 1)] = np.nan
    values = np.where(negative == 1, -values, values)
    if fmt.specials == "extended":
        values[fmt.largest_code + 1] = np.inf
        values[len(values) - 1] = -np.inf
    if fmt.specials in ("fnuz", "extended") and fmt.nan_code is not None:
        values[fmt.nan_code] = np.nan
    signed = np.asarray(values, dtype=np.float64)
    signed.setflags(write=False)
    return signed


FP32 = FloatFormat("fp32", 8, 23, "ieee", bias=127)


def to_single_grid(y: Tensor) -> Tensor:
    """Round float64 numbers to float32 numbers, still as float64."""
    return FP32.cast(y, DOUBLE, rounding="even", saturate=False)
