"""Block scales in UE5M3 lost 6 percent where their mantissa rounds up to the next power of two.

The encoder splits a scale by `frexp`, rounds the mantissa to 3 bits and clamps it to 7: 0.97 becomes
0.9375, because the exponent was taken before. The fix carries into the exponent.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

from tests.museum.exhibit import Exhibit
from tests.museum.fp4 import nearest

LARGEST = 114688.0


def to_ue5m3(x: Tensor, carries: bool) -> Tensor:
    """Return the scales as they are decoded; all are above the subnormal ones."""
    mantissa, exponent = torch.frexp(x)
    steps = ((mantissa - 0.5) * 16).round()
    steps = steps if carries else steps.clamp(0, 7)
    return ((steps + 8) * 2.0 ** (exponent - 4)).clamp(max=LARGEST)


def quantized(w: Tensor, carries: bool) -> Tensor:
    encode = LARGEST * 6 / w.abs().max()
    blocks = w.reshape(len(w), -1, 16)
    unrounded = blocks.abs().amax(2, keepdim=True) * (encode * torch.tensor(1 / 6))
    scales = to_ue5m3(unrounded, carries)
    decode = 1 / encode
    return (nearest(blocks * (1 / (scales * decode))) * scales * decode).reshape(w.shape)


def carried(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, quantized(w, carries=True))


def clamped(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, quantized(w, carries=False))


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    w = torch.randn(96, 128, generator=generator) / 8
    return torch.randn(32, 128, generator=generator), w


EXHIBIT = Exhibit(
    "intel/auto-round#2302", "scales",
    "UE5M3 block scales were rounded without a carry into the exponent.",
    "mantissa rounding overflow, on the CPU and in the CUDA kernel",
    r"argument 1 has block scales rounded to UE5M3 without a carry",
    arguments, carried, clamped, linear, {1: "nvfp4_ue5m3"}, options={"relations": []}, terms=128,
)  # fmt: skip
