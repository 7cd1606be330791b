"""Scales of weights and inputs were rounded up to powers of two; their codes kept the exact ones.

An FP8 product for a new GPU takes powers of two. The scales of a checkpoint and those that had just
been made for the inputs were rounded up on the way to it, so that groups of 128 inputs and tiles of
weights (128 x 128; here 128 columns of each row) were inflated, each by a factor of its own.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit

GROUP = 128
BY_GROUP = qgate.Quantizer("fp8_e4m3", granularity="block", block=GROUP)


def up(scales: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(scales)))


def kernel(codes: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor]) -> Tensor:
    """Multiply codes with scales that are powers of two, whatever it was given."""
    spread = [up(s).repeat_interleave(GROUP, 1) for s in scales]
    return linear(codes[0] * spread[0], codes[1] * spread[1])


def served(x: Tensor, w: Tensor, is_power: bool) -> Tensor:
    exact = [t.unflatten(1, (-1, GROUP)).abs().amax(2) / 448 for t in (x, w)]
    used = [up(s) if is_power else s for s in exact]
    codes = [
        (t / s.repeat_interleave(GROUP, 1)).to(torch.float8_e4m3fn).float()
        for t, s in zip((x, w), used, strict=True)
    ]
    return kernel((codes[0], codes[1]), (used[0], used[1]))


def quantized_with_powers(x: Tensor, w: Tensor) -> Tensor:
    return served(x, w, is_power=True)


def quantized_with_exact_scales(x: Tensor, w: Tensor) -> Tensor:
    return served(x, w, is_power=False)


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 256, generator=generator), torch.randn(24, 256, generator=generator) / 16


EXHIBIT = Exhibit(
    "huggingface/transformers#47030", "scales",
    "Scales of both arguments were rounded up to powers of two; the codes stayed as they were.",
    "finite results without a warning, wrong for every group of 128",
    "each of arguments 0, 1 has scales rounded up to powers of two",
    arguments, quantized_with_powers, quantized_with_exact_scales, linear,
    {0: BY_GROUP, 1: BY_GROUP}, options={"relations": ["one"]}, terms=256,
)  # fmt: skip
