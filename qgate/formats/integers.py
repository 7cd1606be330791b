"""Signed integers in two's complement, and MXINT8's integers with six fraction bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from qgate.formats._element import ElementFormat
from qgate.formats._work import WorkType
from qgate.formats.options import Floats

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class IntFormat(ElementFormat):
    """Integers times 2**-fraction_bits; the lowest has no positive twin, so narrow omits it."""

    width: int
    fraction_bits: int = 0

    options: ClassVar[frozenset[str]] = ElementFormat.options | {"narrow"}
    always_scaled: ClassVar[bool] = True

    @property
    def bits(self) -> int:
        return self.width

    @property
    def layout(self) -> str:
        return "integer" + (f" * 2^-{self.fraction_bits}" if self.fraction_bits else "")

    @property
    def step(self) -> float:
        return float(2.0**-self.fraction_bits)

    @property
    def max(self) -> float:
        return float((2 ** (self.width - 1) - 1) * self.step)

    @property
    def min_normal(self) -> float:
        return self.step

    @property
    def max_exponent(self) -> int:
        return self.width - 2 - self.fraction_bits

    @property
    def mantissa(self) -> int:
        return self.width - 2

    @property
    def notes(self) -> str:
        low = 2 ** (self.width - 1)
        return f"one zero; narrow=False adds -{low}"

    def code_values(self) -> Floats:
        half = 2 ** (self.width - 1)
        codes = np.arange(2 * half)
        return np.asarray(np.where(codes < half, codes, codes - 2 * half) * self.step)

    def values(self) -> Floats:
        """Return the narrow range; the full one has one more value at the low end."""
        return np.asarray(super().values()[1:])

    def bounds(self, *, narrow: bool = True) -> tuple[float, float]:
        return (-self.max if narrow else -self.max - self.step), self.max

    def to_codes(self, y: Tensor, work: WorkType) -> Tensor:
        """Return the integers themselves."""
        del work
        return (y / self.step).nan_to_num_(nan=0.0).to(self.code_dtype())

    def from_codes(self, codes: Tensor, work: WorkType) -> Tensor:
        return codes.to(work.dtype) * self.step

    def code_dtype(self) -> torch.dtype:
        import torch

        return torch.int8

    def inverse_quantum(self, x: Tensor, work: WorkType) -> float:
        del x, work
        return 1.0 / self.step
