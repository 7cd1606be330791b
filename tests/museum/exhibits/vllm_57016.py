"""Experts cast all tokens of a batch with one FP8 scale, so each token depended on all others.

The batch-invariant mode had a scale per token for dense layers. Experts kept one dynamic scale over
the tokens of all requests.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import qgate
from tests.museum.exhibit import Exhibit

BY_TOKEN = qgate.Quantizer("fp8_e4m3", granularity="channel", axis=0)
BY_TENSOR = qgate.Quantizer("fp8_e4m3", granularity="tensor")


def mixed(x: Tensor, weights: Tensor, w: Tensor) -> Tensor:
    expert_outputs = (x[:, None, None, :] * w).sum(-1)
    return (weights[:, :, None] * expert_outputs).sum(1)


def scale_per_token(x: Tensor, weights: Tensor, w: Tensor) -> Tensor:
    return mixed(BY_TOKEN(x), weights, w)


def scale_per_batch(x: Tensor, weights: Tensor, w: Tensor) -> Tensor:
    return mixed(BY_TENSOR(x), weights, w)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(10, 64, generator=generator)
    x[7] *= 8
    weights = torch.rand(10, 4, generator=generator).softmax(-1)
    w = torch.randn(4, 12, 64, generator=generator) / 8
    return x, weights, torch.stack([BY_TENSOR(expert) for expert in w])


EXHIBIT = Exhibit(
    "vllm-project/vllm#57016",
    "invariance",
    "In batch-invariant mode, experts cast the tokens of all requests with one scale.",
    "greedy tokens flip within about 10 positions",
    "argument 0 has one scale for the tensor, not one per channel of axis 0",
    arguments, scale_per_token, scale_per_batch, mixed, {0: BY_TOKEN},
    options={"relations": ["one", "permuted"], "invariant": True},
)  # fmt: skip
