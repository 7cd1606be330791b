"""A sliding window of W keys was handed to flash attention, which takes W keys before the query.

Flash attention lets query i see keys i - W to i, both included, so that every query saw W + 1 keys.
Eager attention saw W. Here K and V are in an FP8 cache.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import scaled_dot_product_attention

import qgate
from tests.museum.exhibit import Exhibit

CACHE = qgate.Quantizer("fp8_e4m3", granularity="tensor")


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend to the query's own key and the `window` - 1 keys before it."""
    distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    return scaled_dot_product_attention(q, k, v, (distance >= 0) & (distance < window))


def flash_attention(q: Tensor, k: Tensor, v: Tensor, left: int) -> Tensor:
    """Attend to the query's own key and the `left` keys before it."""
    distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    return scaled_dot_product_attention(q, CACHE(k), CACHE(v), (distance >= 0) & (distance <= left))


def one_less(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return flash_attention(q, k, v, window - 1)


def window_as_it_is(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return flash_attention(q, k, v, window)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor, int]:
    q, k, v = (torch.randn(1, 2, 40, 16, generator=generator) for _ in range(3))
    return q, k, v, 16


EXHIBIT = Exhibit(
    "huggingface/transformers#39408",
    "positions",
    "A sliding window of W keys was W + 1 keys long.",
    "windows of 2 W + 1 keys, or of W + 1 with causal attention",
    "argument 3 is taken as 17, not 16",
    arguments, one_less, window_as_it_is, windowed, {1: CACHE, 2: CACHE},
    options={"relations": ["prefix"]},
)  # fmt: skip
