"""Hopper's FP8 products keep 14 bits, and nothing took the sums out in between.

The products of 32 terms are shifted to the largest exponent and cut off after 14 bits, as is what
they are added to. An exact float32 sum of 32 such products needs 34 bits. That is what the hardware
does, so such a kernel agrees, and the report says what it costs. DeepGEMM promises more: it adds up
no more than 128 terms in this way, and those sums in float32. A check holds it at that promise.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from qgate.arithmetics.known import PRODUCTS
from tests.museum.exhibit import Exhibit

E4M3 = torch.float8_e4m3fn
FP8 = qgate.Quantizer("fp8_e4m3", granularity="tensor")


def product(x: Tensor, w: Tensor, arithmetic: str) -> Tensor:
    """Multiply codes as a tensor core does, and the sums by both scales."""
    sides = FP8(x), FP8(w)
    scales = [side.abs().amax() / 448 for side in sides]
    codes = [(side / scale).to(E4M3) for side, scale in zip(sides, scales, strict=True)]
    return PRODUCTS[arithmetic].sums(codes[0], codes[1], (E4M3, E4M3)) * (scales[0] * scales[1])


def added_every_128(x: Tensor, w: Tensor) -> Tensor:
    return product(x, w, "hopper-fp8-slow")


def with_14_bits(x: Tensor, w: Tensor) -> Tensor:
    return product(x, w, "hopper-fp8-fast")


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 1024, generator=generator)
    return x, torch.randn(12, 1024, generator=generator) / 32


EXHIBIT = Exhibit(
    "deepseek-ai/DeepGEMM#37",
    "accumulation",
    "FP8 products were accumulated with 14 bits throughout the sum.",
    "only the 14 highest bits of each product count; exact sums of 32 need 34",
    "does not follow 'hopper-fp8-slow' .* it follows Hopper FP8, fast accumulation",
    arguments, added_every_128, with_14_bits, linear, {0: FP8, 1: FP8},
    options={"relations": ["one"], "arithmetic": "hopper-fp8-slow"}, terms=1024,
)  # fmt: skip
