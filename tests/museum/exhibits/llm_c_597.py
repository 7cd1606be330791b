"""Stochastic rounding of all layers drew the same random numbers.

The seed of the optimizer's rounding depended on the thread and on the size of the grid, and not on
the layer, so that each layer moved the same elements up. Each value is one of its two neighbors, and
right on average. The project has noise of its own; here Philox stands for it.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import qgate
from qgate.formats import Philox
from tests.museum.exhibit import Exhibit

LAYERS, SIZE = 12, 96
NOISE = Philox(1337, bits=16, carry=True)


def rounded(x: Tensor, words: Tensor) -> Tensor:
    """Add random bits to those that bf16 has no room for, and cut these off."""
    bits = x.view(torch.int32) + (words & 0xFFFF).to(torch.int32)
    return (bits >> 16 << 16).view(torch.float32).bfloat16()


def noise_of_each_layer(x: Tensor) -> Tensor:
    return rounded(x, NOISE.words(x.numel()).view(x.shape))


def noise_of_the_first_layer(x: Tensor) -> Tensor:
    return rounded(x, NOISE.words(SIZE).expand(x.shape))


def arguments(generator: Generator) -> tuple[Tensor]:
    return (torch.randn(LAYERS, SIZE, generator=generator) / 8,)


EXHIBIT = Exhibit(
    "karpathy/llm.c#597",
    "accumulation",
    "All layers were rounded at random by the same random numbers.",
    "the same seed for 16 tensors, and in 12 layers of each",
    "every row has the draws of the first one",
    arguments, noise_of_each_layer, noise_of_the_first_layer, lambda x: x,
    output=qgate.Quantizer("bf16", rounding="stochastic", generator=NOISE),
    options={"relations": []}, terms=0,
)  # fmt: skip
