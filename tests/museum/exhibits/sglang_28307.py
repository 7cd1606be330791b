"""Scales were rounded up to powers of two after the values had been quantized with the exact ones.

Blackwell's kernels take UE8M0 scales. The input of one projection was quantized in groups of 128
with float32 scales; these were then rounded up, and the codes stayed as they were, so every group
came out up to two times too large. The right way quantizes with the rounded scales.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit

GROUP = 128
BY_GROUP = qgate.Quantizer("fp8_e4m3", granularity="block", block=GROUP)


def exact_scales(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1, GROUP).abs().amax(2) / 448


def power_of_two(scales: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(scales)))


def codes(x: Tensor, scales: Tensor) -> Tensor:
    return (x / scales.repeat_interleave(GROUP, 1)).to(torch.float8_e4m3fn)


def kernel(codes: Tensor, scales: Tensor, w: Tensor) -> Tensor:
    return linear(codes.float() * scales.repeat_interleave(GROUP, 1), w)


def rounded_first(x: Tensor, w: Tensor) -> Tensor:
    scales = power_of_two(exact_scales(x))
    return kernel(codes(x, scales), scales, w)


def rounded_afterwards(x: Tensor, w: Tensor) -> Tensor:
    exact = exact_scales(x)
    return kernel(codes(x, exact), power_of_two(exact), w)


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 256, generator=generator), torch.randn(24, 256, generator=generator) / 16


EXHIBIT = Exhibit(
    "sgl-project/sglang#28307",
    "scales",
    "Scales were rounded up to powers of two, and the codes stayed as they were.",
    "14.1 times the error; accept length 2.76 → 2.69",
    "argument 0 has scales rounded up to powers of two",
    arguments, rounded_first, rounded_afterwards, linear, {0: BY_GROUP},
    options={"relations": ["one"]}, terms=256,
)  # fmt: skip
