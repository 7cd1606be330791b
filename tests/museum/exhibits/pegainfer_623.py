"""A decoding request got other bits once more than 32 requests were decoded together.

Up to 32 requests the keys are split into chunks whose softmax is merged, beyond that they are taken
in one pass. The batch-invariant mode had pinned the size of chunks, not which of the two runs.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from tests.museum.exhibit import Exhibit

CHUNK, MOST = 16, 32


def decoded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with one query per request: [request, channel], [request, key, channel]."""
    scores = (k * q[:, None]).sum(-1) / math.sqrt(q.shape[-1])
    return (scores.softmax(-1)[:, :, None] * v).sum(1)


def in_chunks(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
    total, weight = q.new_zeros(len(q), v.shape[-1]), q.new_zeros(len(q), 1)
    largest = q.new_full((len(q), 1), -math.inf)
    for keys, values in zip(k.split(size, 1), v.split(size, 1), strict=True):
        scores = (keys * q[:, None]).sum(-1) / math.sqrt(q.shape[-1])
        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        shares = torch.exp(scores - largest)
        decay = torch.exp(before - largest)
        total = total * decay + (shares[:, :, None] * values).sum(1)
        weight = weight * decay + shares.sum(-1, keepdim=True)
    return total / weight


def always_split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return in_chunks(q, k, v, CHUNK)


def split_up_to_32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return in_chunks(q, k, v, CHUNK if len(q) <= MOST else k.shape[1])


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(33, 32, generator=generator)
    return q, *(torch.randn(33, 64, 32, generator=generator) for _ in range(2))


EXHIBIT = Exhibit(
    "pegainfer-project/pegainfer#623", "invariance",
    "Beyond 32 requests, decoding no longer split the keys.",
    "logits of a request depend on the requests beside it",
    "is not batch-invariant: .* values differ from the example's for the (first|last) of 33",
    arguments, always_split, split_up_to_32, decoded,
    options={"relations": ["one"], "invariant": True},
)  # fmt: skip
