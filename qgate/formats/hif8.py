"""HiFloat8: eight bits whose exponent and mantissa widths change with the magnitude.

A prefix of the code, the dot, says how many exponent bits follow; what is left is mantissa. Numbers
near one get three mantissa bits, those far away one, and below 2**-15 there are powers of two only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from qgate.formats._element import ElementFormat
from qgate.formats._work import WorkType
from qgate.formats.options import Floats, Rounding

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from qgate.formats._work import ChunkDraws

# dot prefix, its length, exponent bits, mantissa bits
_DOTS = ((0b11, 2, 4, 1), (0b10, 2, 3, 2), (0b01, 2, 2, 3), (0b001, 3, 1, 3), (0b0001, 4, 0, 3))


@dataclass(frozen=True)
class HiF8Format(ElementFormat):
    """The HiFloat8 of arXiv 2409.16626: ties away from zero, one zero, one NaN, two infinities."""

    rounding: ClassVar[Rounding] = "away"
    tapered: ClassVar[bool] = True
    bits = 8
    layout = "tapered"
    min_normal = 2.0**-15
    max_exponent = 15
    mantissa = 1
    notes = "ties away; one zero; Inf, NaN"

    def code_values(self) -> Floats:
        return _code_values()

    def to_grid(
        self,
        x: Tensor,
        work: WorkType,
        rounding: Rounding,
        generator: Generator | ChunkDraws | None = None,
    ) -> Tensor:
        y = super().to_grid(x, work, rounding, generator)
        if rounding == "even":
            # Subnormal values are single powers of two, so evenness alternates with the exponent:
            # of the ties between them, those above an even code have to go down.
            for exponent in (-21, -19, -17):
                low = 2.0**exponent
                y = y.where(x.abs() != 1.5 * low, x.sign() * low)
        return y

    def inverse_quantum(self, x: Tensor, work: WorkType) -> Tensor:
        field = x.view(work.integer).bitwise_and(work.exponent_mask) >> work.mantissa
        table = work.table(("hif8", work.bias), lambda: _inverse_quanta(work.bias), x.device)
        flat = table.index_select(0, field.reshape(-1).int())
        return flat.view(x.shape)


def _value(code: int) -> float:
    """Return the value of one non-negative code, field by field."""
    for dot, length, exponent_bits, mantissa_bits in _DOTS:
        if code >> (7 - length) == dot:
            exponent = 0
            if exponent_bits:
                field = (code >> mantissa_bits) & (2**exponent_bits - 1)
                hidden = 1 << (exponent_bits - 1)
                magnitude = hidden | (field & (hidden - 1))
                exponent = -magnitude if field & hidden else magnitude
            fraction = code & (2**mantissa_bits - 1)
            return float(2.0**exponent * (1 + fraction / 2**mantissa_bits))
    return float(2.0 ** ((code & 7) - 23)) if code else 0.0


@lru_cache(maxsize=1)
def _code_values() -> Floats:
    positive = np.array([_value(code) for code in range(128)])
    positive[0x6F] = np.inf
    values = np.concatenate([positive, -positive])
    values[0x80] = np.nan
    values.setflags(write=False)
    return values


def _mantissa_bits(exponent: int) -> int:
    if exponent < -15:
        return 0
    distance = abs(exponent)
    return 3 if distance < 4 else 2 if distance < 8 else 1


@lru_cache(maxsize=2)
def _inverse_quanta(bias: int) -> tuple[float, ...]:
    """Return 1 / quantum for each exponent field of the work type, from zero to Inf."""
    exponents = range(-bias, bias + 2)
    return tuple(
        2.0 ** (_mantissa_bits(e) - max(e, -22)) for e in (min(x, bias) for x in exponents)
    )
