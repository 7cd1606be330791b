"""K and V of an FP8 cache were used without their scales when the query was FP8, too.

The unified attention kernel casts a tile of the cache to the query's dtype. If that is FP8, it
returned the codes as they are, before the line that multiplies them by `k_descale` or `v_descale`.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import scaled_dot_product_attention

import qgate
from tests.museum.exhibit import Exhibit

FP8 = qgate.Quantizer("fp8_e4m3", granularity="tensor")


def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax() / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def scaled_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (codes.float() * scale for codes, scale in map(encoded, (q, k, v)))
    return scaled_dot_product_attention(q, k, v)


def tiles_as_they_are(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    query, scale = encoded(q)
    tiles = [codes.to(query.dtype).float() for codes, _ in map(encoded, (k, v))]
    return scaled_dot_product_attention(query.float() * scale, *tiles)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, 8, 64, generator=generator)
    k, v = (torch.randn(2, 24, 64, generator=generator) for _ in range(2))
    return q, k, v


EXHIBIT = Exhibit(
    "vllm-project/vllm#42580",
    "caches",
    "The scales of an FP8 cache were dropped when the query was FP8 as well.",
    "2,048 tokens of output, all of them special tokens",
    "each of arguments 1, 2 is decoded without scales",
    arguments, scaled_tiles, tiles_as_they_are, scaled_dot_product_attention,
    {0: FP8, 1: FP8, 2: FP8}, options={"relations": ["one", "prefix"]},
)  # fmt: skip
