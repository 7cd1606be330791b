"""A kernel that takes powers of two as scales was given others, and cut off their mantissas.

The FP8 product of an attention output was called with one float32 scale per token and group of 128,
as on Hopper. The kernel for the other GPU reads the exponents of scales alone, so every group came
out up to two times too small. The right way makes scales that are powers of two and quantizes
with these.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit

GROUP = 128
BY_GROUP = qgate.Quantizer("fp8_e4m3", granularity="block", block=GROUP)


def amax_scales(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1, GROUP).abs().amax(2) / 448


def quantized(x: Tensor, scales: Tensor) -> Tensor:
    return (x / scales.repeat_interleave(GROUP, 1)).to(torch.float8_e4m3fn)


def kernel(codes: Tensor, scales: Tensor, w: Tensor) -> Tensor:
    """Multiply by the exponents of the scales, whatever their mantissas."""
    exponents = torch.exp2(torch.floor(torch.log2(scales)))
    return linear(codes.float() * exponents.repeat_interleave(GROUP, 1), w)


def power_of_two_scales(x: Tensor, w: Tensor) -> Tensor:
    scales = torch.exp2(torch.ceil(torch.log2(amax_scales(x))))
    return kernel(quantized(x, scales), scales, w)


def float32_scales(x: Tensor, w: Tensor) -> Tensor:
    scales = amax_scales(x)
    return kernel(quantized(x, scales), scales, w)


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 256, generator=generator), torch.randn(24, 256, generator=generator) / 16


EXHIBIT = Exhibit(
    "sgl-project/sglang#39193",
    "scales",
    "The mantissas of float32 scales were cut off by a kernel that takes powers of two.",
    "results about 25 % off, without an error message",
    "argument 0 has scales rounded down to powers of two",
    arguments, power_of_two_scales, float32_scales, linear, {0: BY_GROUP},
    options={"relations": ["one"]}, terms=256,
)  # fmt: skip
