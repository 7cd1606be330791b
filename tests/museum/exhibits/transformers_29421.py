"""Activations were not divided by scales, where the weights had been multiplied by them.

AWQ multiplies the input channels of a layer by scales and divides the activation before it by the
same. The loader left the activation as it was and the scales of the checkpoint unused, with a
warning: every channel came with the weight that it was quantized with.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import gelu, linear

import qgate
from tests.museum.exhibit import Exhibit

INT4 = qgate.Quantizer("int4", granularity="block", block=32)
SCALES = torch.rand(64, generator=torch.Generator().manual_seed(2)) * 1.5 + 0.5


def smoothed(w: Tensor) -> Tensor:
    """Quantize as AWQ does: the channels multiplied by their scales."""
    return INT4(w * SCALES)


def layer(hidden: Tensor, w: Tensor) -> Tensor:
    return linear(hidden, w)


def served(hidden: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    return linear(hidden / scales, smoothed(w))


def scales_loaded(hidden: Tensor, w: Tensor) -> Tensor:
    return served(hidden, w, SCALES)


def scales_of_one(hidden: Tensor, w: Tensor) -> Tensor:
    return served(hidden, w, torch.ones(64))


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    hidden = gelu(torch.randn(16, 64, generator=generator))
    return hidden, torch.randn(48, 64, generator=generator) / 8


EXHIBIT = Exhibit(
    "huggingface/transformers#29421",
    "checkpoints",
    "Scales that smooth activations were not loaded, and nothing divided by them.",
    "scales of AutoAWQ checkpoints unused at loading",
    "the terms of the sum over 64 .* have weights of their own, 0.5[0-9]* to 1.9.*: a scale per channel",
    arguments, scales_loaded, scales_of_one, layer, {1: lambda w: smoothed(w) / SCALES},
    options={"relations": []}, terms=64,
)  # fmt: skip
