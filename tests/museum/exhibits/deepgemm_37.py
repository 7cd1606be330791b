"""Hopper's FP8 products are added with 14 bits, and nothing took the sums out in between.

The products of 32 terms are shifted to the largest exponent and cut off after 14 bits, as is what
they are added to. An exact float32 sum of 32 such products needs 34 bits. DeepGEMM adds up no more
than 128 terms in this way, and those sums in float32.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit

FP8 = qgate.Quantizer("fp8_e4m3", granularity="tensor")
AT_ONCE = 32


def summed(x: Tensor, w: Tensor, bits: int) -> Tensor:
    """Add up products in float64 that are cut off `bits` below the largest one."""
    total = torch.zeros(len(x), len(w), dtype=torch.float64)
    for first in range(0, x.shape[1], AT_ONCE):
        part = slice(first, first + AT_ONCE)
        terms = torch.cat([x[:, None, part].double() * w[:, part], total[:, :, None]], -1)
        exponent = terms.abs().amax(-1, keepdim=True).clamp_min(2.0**-100).log2().floor()
        unit = torch.exp2(exponent - (bits - 1))
        total = ((terms / unit).floor() * unit).sum(-1)
    return total.float()


def with_34_bits(x: Tensor, w: Tensor) -> Tensor:
    return summed(FP8(x), FP8(w), 34)


def with_14_bits(x: Tensor, w: Tensor) -> Tensor:
    return summed(FP8(x), FP8(w), 14)


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 1024, generator=generator)
    return x, torch.randn(12, 1024, generator=generator) / 32


EXHIBIT = Exhibit(
    "deepseek-ai/DeepGEMM#37",
    "accumulation",
    "FP8 products were accumulated with 14 bits throughout the sum.",
    "only the 14 highest bits of each product count; exact sums of 32 need 34",
    "errors look like rounding downward alone: sums are cut off",
    arguments, with_34_bits, with_14_bits, linear, {0: FP8, 1: FP8},
    options={"relations": ["one"]}, terms=1024,
)  # fmt: skip
