"""A conversion of UE5M3 numbers made infinities of the seven largest ones.

UE5M3 has five bits of exponent and three of mantissa, no sign and no infinity: 255 is NaN, and 248 to
254 are 65,536 to 114,688. They were converted by IEEE's rule for the last exponent. Encoding was
right. Here the numbers are the block scales of weights.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from qgate.formats import Encoded
from tests.museum.exhibit import Exhibit
from tests.museum.fp4 import decode


def pack(w: Encoded) -> tuple[Tensor, Tensor, Tensor]:
    assert w.scales is not None
    assert w.tensor_scale is not None
    return w.codes, w.scales.view(torch.uint8), w.tensor_scale


def converted(bits: Tensor, last: Tensor) -> Tensor:
    """Return the values of bytes: float16 has their exponents, but for the last one."""
    halves = (bits.int() << 7).to(torch.int16).view(torch.float16).float()
    return torch.where(bits >= 248, last, halves)


def product(x: Tensor, codes: Tensor, scales: Tensor, whole: Tensor) -> Tensor:
    return linear(x, decode(codes) * scales.repeat_interleave(16, 1) * whole)


def finite(x: Tensor, codes: Tensor, bits: Tensor, whole: Tensor) -> Tensor:
    return product(x, codes, converted(bits, (8 + bits % 8) * 2.0**13), whole)


def as_ieee(x: Tensor, codes: Tensor, bits: Tensor, whole: Tensor) -> Tensor:
    return product(x, codes, converted(bits, torch.tensor(torch.inf)), whole)


def arguments(generator: Generator) -> tuple[Tensor, Encoded]:
    w = torch.randn(48, 128, generator=generator) / 8
    w *= 2.0 ** torch.randint(-8, 1, (48, 1), generator=generator)
    return torch.randn(32, 128, generator=generator), qgate.encode(w, "nvfp4_ue5m3")


EXHIBIT = Exhibit(
    "NVIDIA/cutlass#3602", "packing",
    "The largest UE5M3 numbers became infinities, of which the format has none.",
    "inf for codes 248 to 254 instead of 65,536 to 114,688",
    "results are .* where finite ones are expected",
    arguments, finite, as_ieee, linear,
    options={"pack": {1: pack}, "relations": []}, terms=128,
)  # fmt: skip
