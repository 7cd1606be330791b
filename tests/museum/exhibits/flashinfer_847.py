"""A decode kernel that turns the query itself did not read the position it was given.

`q_rope_offset` of the parameters was read by the prefill kernel alone; decode took the last position
of the cache. Here K and V are in an FP8 cache, K not yet turned.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import scaled_dot_product_attention

import qgate
from tests.museum.exhibit import Exhibit

CACHE = qgate.Quantizer("fp8_e4m3", granularity="tensor")


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Turn rows [..., position, channel] by RoPE."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def decoded(q: Tensor, k: Tensor, v: Tensor, offset: int) -> Tensor:
    """Attend with one query per head, [head, 1, channel], that stands at a position."""
    keys = turned(k, torch.arange(k.shape[-2]))
    return scaled_dot_product_attention(turned(q, torch.tensor([offset])), keys, v)


def at_its_offset(q: Tensor, k: Tensor, v: Tensor, offset: int) -> Tensor:
    return decoded(q, CACHE(k), CACHE(v), offset)


def at_the_end(q: Tensor, k: Tensor, v: Tensor, _offset: int) -> Tensor:
    return decoded(q, CACHE(k), CACHE(v), k.shape[-2] - 1)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor, int]:
    q = torch.randn(4, 1, 32, generator=generator)
    k, v = (torch.randn(4, 24, 32, generator=generator) for _ in range(2))
    return q, k, v, 40


EXHIBIT = Exhibit(
    "flashinfer-ai/flashinfer#847",
    "positions",
    "A decode kernel ignored the query's RoPE offset.",
    "`q_rope_offset` was not processed",
    "argument 3 is taken as 23, not 40",
    arguments, at_its_offset, at_the_end, decoded, {1: CACHE, 2: CACHE},
    options={"relations": ["one"]},
)  # fmt: skip
