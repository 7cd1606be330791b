"""FP8 attention added the values of all keys in the short accumulator of Hopper's tensor cores.

It cuts off products and sums some 14 bits below the largest one. That is what the hardware does,
and of a few keys it costs nothing; over a long text what it cuts off adds up. The fix takes the
sum of a tile of keys out and adds it in float32, as other libraries do.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from qgate.arithmetics.known import PRODUCTS
from tests.museum.exhibit import Exhibit

E4M3 = torch.float8_e4m3fn
FP8 = qgate.Quantizer("fp8_e4m3", granularity="tensor")
KEYS = 1024


def weighted(p: Tensor, v: Tensor, arithmetic: str) -> Tensor:
    """Multiply codes of probabilities and values as a tensor core does, and sums by both scales."""
    sides = FP8(p), FP8(v)
    scales = [side.abs().amax() / 448 for side in sides]
    codes = [(side / scale).to(E4M3) for side, scale in zip(sides, scales, strict=True)]
    return PRODUCTS[arithmetic].sums(codes[0], codes[1], (E4M3, E4M3)) * (scales[0] * scales[1])


def taken_out_by_tile(p: Tensor, v: Tensor) -> Tensor:
    return weighted(p, v, "hopper-fp8-slow")


def in_one_accumulator(p: Tensor, v: Tensor) -> Tensor:
    return weighted(p, v, "hopper-fp8-fast")


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw the probabilities of 8 queries, and values with features first."""
    p = torch.randn(8, KEYS, generator=generator).softmax(-1)
    return p, torch.randn(16, KEYS, generator=generator)


EXHIBIT = Exhibit(
    "Dao-AILab/flash-attention#2250",
    "accumulation",
    "FP8 attention summed the values of all keys in Hopper's short accumulator.",
    "drastic accuracy drops on long sequences, seen at finding a needle in a haystack",
    "does not follow 'hopper-fp8-slow' .* it follows Hopper FP8, fast accumulation",
    arguments, taken_out_by_tile, in_one_accumulator, linear, {0: FP8, 1: FP8},
    options={"relations": ["one"], "arithmetic": "hopper-fp8-slow"}, terms=KEYS,
)  # fmt: skip
