"""The MXFP8 recipe cast gradients to E5M2, which the block scales make a loss of a bit for nothing.

`fp8 = "hybrid"` means E4M3 forward and E5M2 backward. With a scale per 32 values E4M3 has the range
that gradients need; the recipe must say "e4m3".
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import qgate
from tests.museum.exhibit import Exhibit


def input_gradient(dy: Tensor, w: Tensor) -> Tensor:
    return dy @ w


def weights(w: Tensor) -> Tensor:
    return qgate.quantize(w, "mxfp8", axis=0)


def e4m3(dy: Tensor, w: Tensor) -> Tensor:
    return input_gradient(qgate.quantize(dy, "mxfp8_e4m3"), weights(w))


def hybrid(dy: Tensor, w: Tensor) -> Tensor:
    return input_gradient(qgate.quantize(dy, "mxfp8_e5m2"), weights(w))


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    dy = torch.randn(16, 64, generator=generator) * 2.0**-14
    return dy, torch.randn(64, 48, generator=generator) / 8


EXHIBIT = Exhibit(
    "NVIDIA-NeMo/Megatron-Bridge#638",
    "rollout",
    "An MXFP8 recipe cast gradients to E5M2.",
    "the training curve diverges, and MMLU falls",
    "argument 0 is mxfp8_e5m2, not mxfp8_e4m3",
    arguments, e4m3, hybrid, input_gradient,
    {0: "mxfp8_e4m3", 1: qgate.Quantizer("mxfp8_e4m3", axis=0)},
    options={"relations": ["one"]}, terms=64,
)  # fmt: skip
