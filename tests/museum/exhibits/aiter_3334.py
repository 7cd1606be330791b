"""Shards of keys were smoothed each by its own mean, and merged as if their sums were those of K.

SageAttention subtracts the mean of K before it quantizes, which moves all logits of a query by one
number. That leaves its output as it was, and moves the logarithm of its sum, by which ring attention
weights the shards' outputs.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import scaled_dot_product_attention as attention

from qgate.formats.groups import warps
from qgate.testing import quantized
from tests.museum.exhibit import Exhibit

SHARDS, BLOCK = 2, 16


def sage(q: Tensor, k: Tensor, v: Tensor, compensated: bool) -> tuple[Tensor, Tensor]:
    """Return the output of one shard, and the logarithm of the sum that divided it."""
    mean = k.mean(-2, keepdim=True)
    blocks = (k - mean).unflatten(-2, (-1, BLOCK))
    scale = blocks.abs().amax((-2, -1), keepdim=True) / 127
    logits = q @ ((blocks / scale).round() * scale).flatten(-3, -2).mT * q.shape[-1] ** -0.5
    moved = (q @ mean.mT).squeeze(-1) * q.shape[-1] ** -0.5
    return logits.softmax(-1) @ v, logits.logsumexp(-1) + moved * compensated


def sums_of_k(q: Tensor, k: Tensor, v: Tensor, compensated: bool = True) -> Tensor:
    """Merge the outputs of all shards."""
    parts = zip(k.chunk(SHARDS, -2), v.chunk(SHARDS, -2), strict=True)
    outputs, sums = zip(*(sage(q, *part, compensated) for part in parts), strict=True)
    return (torch.stack(sums).softmax(0)[..., None] * torch.stack(outputs)).sum(0)


def sums_of_smoothed_k(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sums_of_k(q, k, v, compensated=False)


def like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shards = k.unflatten(-2, (SHARDS, -1))
    mean = shards.mean(-2, keepdim=True)
    keys = quantized("k", shards - mean, "int8", groups=warps(BLOCK)) + mean
    return attention(q, keys.flatten(-3, -2), v)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, 64, 8, generator=generator) for _ in range(3))
    return q, k + torch.randn(8, generator=generator), v


EXHIBIT = Exhibit(
    "ROCm/aiter#3334", "accumulation",
    "Shards of smoothed keys were merged by sums of their own logits, each off by its mean.",
    "structured artifacts in videos, the more shards the worse",
    "the result of a mean is not added",
    arguments, sums_of_k, sums_of_smoothed_k, like, options={"relations": ["one"]},
)  # fmt: skip
