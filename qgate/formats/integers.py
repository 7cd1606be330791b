"""Integers: signed in two's complement, unsigned, and MXINT8's with six fraction bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from qgate.formats._element import ElementFormat, round_to_integer
from qgate.formats._work import CastContext, ScaledChunk, WorkType
from qgate.formats.options import Floats

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class IntFormat(ElementFormat):
    """Integers times 2**-fraction_bits.

    The lowest signed one has no positive twin, so narrow omits it.
    """

    width: int
    fraction_bits: int = 0
    signed: bool = True

    options: ClassVar[frozenset[str]] = ElementFormat.options | {"narrow", "zero_point"}
    always_scaled: ClassVar[bool] = True
    stored: ClassVar[dict[str, int]] = {"scales": 1, "zero_points": 1}

    @property
    def bits(self) -> int:
        return self.width

    @property
    def layout(self) -> str:
        words = "integer" if self.signed else "unsigned"
        return words + (f" * 2^-{self.fraction_bits}" if self.fraction_bits else "")

    @property
    def step(self) -> float:
        return float(2.0**-self.fraction_bits)

    @property
    def max(self) -> float:
        return float((2 ** (self.width - self.signed) - 1) * self.step)

    @property
    def min_normal(self) -> float:
        return self.step

    @property
    def max_exponent(self) -> int:
        return self.width - 1 - self.signed - self.fraction_bits

    @property
    def mantissa(self) -> int:
        return self.width - 1 - self.signed

    @property
    def notes(self) -> str:
        low = 2 ** (self.width - 1)
        return f"one zero, -{low} by narrow=False" if self.signed else "no negative values"

    def code_values(self) -> Floats:
        codes = np.arange(2**self.width)
        if self.signed:
            codes -= 2 * (codes & 2 ** (self.width - 1))
        return np.asarray(codes * self.step)

    def values(self) -> Floats:
        """Return the narrow range; the full one has one more value at the low end."""
        return np.asarray(super().values()[int(self.signed) :])

    def bounds(self, *, narrow: bool = True) -> tuple[float, float]:
        if not self.signed:
            return 0.0, self.max
        return (-self.max if narrow else -self.max - self.step), self.max

    def split(self, x: Tensor, context: CastContext) -> ScaledChunk:
        q, scale, zero_point = context.q, context.state, context.zero_point
        if scale is None or zero_point is None:
            return super().split(x, context)
        low, high = self.bounds(narrow=q.narrow)
        ratios = context.divide(x, scale).masked_fill_(scale.isnan(), 0.0)
        inside = ratios.clamp(low - zero_point, high - zero_point)
        elements = round_to_integer(inside, context.work, q.rounding, q.generator).add_(0.0)
        return ScaledChunk(elements, scale, ratios, zero_point=zero_point)

    def to_codes(self, y: Tensor, work: WorkType) -> Tensor:
        """Return the integers themselves."""
        del work
        return (y / self.step).nan_to_num_(nan=0.0).to(self.code_dtype())

    def from_codes(self, codes: Tensor, work: WorkType) -> Tensor:
        return codes.to(work.dtype) * self.step

    def code_dtype(self) -> torch.dtype:
        import torch

        return torch.int8 if self.signed else torch.uint8

    def inverse_quantum(self, x: Tensor, work: WorkType) -> float:
        del x, work
        return 1.0 / self.step
