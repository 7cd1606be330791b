"""The weights of every expert were decoded with the scale of the first one.

A launcher passed a stride of 0 for scales of shape [experts], which a branch of the kernel for
scales per channel then used. The test of all combinations skipped this one.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import qgate
from tests.museum.exhibit import Exhibit

BY_EXPERT = qgate.Quantizer("fp8_e4m3", granularity="channel", axis=0)


def product(x: Tensor, w: Tensor) -> Tensor:
    """Multiply the tokens of each expert [expert, token, k] by its weights [expert, n, k]."""
    return torch.einsum("emk,enk->emn", x, w)


def launched(x: Tensor, w: Tensor, stride: int) -> Tensor:
    scales = w.abs().amax((1, 2)) / 448
    codes = (w / scales[:, None, None]).to(torch.float8_e4m3fn).float()
    used = scales[torch.arange(len(w)) * stride]
    return product(x, codes * used[:, None, None])


def next_scale(x: Tensor, w: Tensor) -> Tensor:
    return launched(x, w, 1)


def first_scale(x: Tensor, w: Tensor) -> Tensor:
    return launched(x, w, 0)


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 6, 64, generator=generator)
    return x, torch.randn(4, 12, 64, generator=generator) / 8


EXHIBIT = Exhibit(
    "vllm-project/vllm#57092",
    "experts",
    "A stride of 0 decoded the weights of all experts with the scale of the first.",
    "every expert used the scale of expert 0; tests skipped this combination",
    "argument 1 is decoded with one scale, that of the first group, for all groups",
    arguments, next_scale, first_scale, product, {1: BY_EXPERT},
    options={"relations": ["one"]}, terms=64,
)  # fmt: skip
