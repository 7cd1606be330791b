"""Zero points of 32 bits were read as if they had 64.

Zero points of channels may be stored in either width. The width was checked, and then read as 64 bits
at all times: two neighbors became one huge number, and the second half was read from whatever lay
behind the array.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.museum.exhibit import Exhibit


def parameters(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point of each row for codes from -128 to 127."""
    low, high = w.amin(1, keepdim=True).clamp(max=0), w.amax(1, keepdim=True).clamp(min=0)
    scales = (high - low) / 255
    return scales, (-128 - low / scales).round()


def asymmetric(w: Tensor) -> Tensor:
    scales, zeros = parameters(w)
    return ((w / scales + zeros).round().clamp(-128, 127) - zeros) * scales


def stored(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and zero points, with other numbers behind these in memory."""
    scales, zeros = parameters(w)
    codes = (w / scales + zeros).round().clamp(-128, 127).to(torch.int8)
    memory = torch.cat([zeros.int().reshape(-1), codes.int().reshape(-1)[: len(w)]])
    return codes, scales, memory


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return ((codes - zeros[: len(codes), None]) * scales.double()).float()


def of_32_bits(codes: Tensor, scales: Tensor, memory: Tensor) -> Tensor:
    return dequantize(codes, scales, memory)


def of_64_bits(codes: Tensor, scales: Tensor, memory: Tensor) -> Tensor:
    return dequantize(codes, scales, memory.view(torch.int64))


def arguments(generator: Generator) -> tuple[Tensor]:
    return (torch.randn(16, 64, generator=generator) + 0.3,)


EXHIBIT = Exhibit(
    "pytorch/executorch#21773", "packing",
    "Zero points of 32 bits were read with a stride of 64.",
    "a bias of zeros decodes to 37.7, another one to 78.7 instead of 0.047",
    "all 16 rows are off by a number each, .*: a zero point is off",
    arguments, of_32_bits, of_64_bits, lambda w: w, {0: asymmetric},
    options={"pack": {0: stored}, "relations": []}, terms=0,
)  # fmt: skip
