"""A reference's causal mask started at the first key, although the queries were the last tokens.

The reference of a KV cache asked for a causal mask at every step of several tokens, and torch's
`is_causal` lets query i see keys 0 to i. In the second chunk of a prompt the first query so saw one
key in place of the whole history. The runtime was right. Here K and V are in an FP8 cache.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import scaled_dot_product_attention

import qgate
from tests.museum.exhibit import Exhibit

CACHE = qgate.Quantizer("fp8_e4m3", granularity="tensor")


def masked(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    """Attend causally with the first query at a position among the keys."""
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(first)
    return scaled_dot_product_attention(q, k, v, mask)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(q, k, v, k.shape[-2] - q.shape[-2])


def from_the_end(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q, CACHE(k), CACHE(v))


def from_the_start(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(q, CACHE(k), CACHE(v), 0)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(1, 2, 3, 16, generator=generator)
    k, v = (torch.randn(1, 2, 32, 16, generator=generator) for _ in range(2))
    return q, k, v


EXHIBIT = Exhibit(
    "pytorch/executorch#21749",
    "positions",
    "A reference's causal mask was aligned to the first key instead of the last one.",
    "silent: prior context hidden from every chunk but the first; the runtime was right",
    "the mask is aligned at the first rows and keys",
    arguments, from_the_end, from_the_start, causal, {1: CACHE, 2: CACHE},
    options={"relations": ["one"]},
)  # fmt: skip
