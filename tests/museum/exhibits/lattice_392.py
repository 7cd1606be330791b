"""The 8-bit forward pass turned neighboring channels in RoPE instead of channels half a head apart.

The float path turns channels i and i + half of the rotary part of a head, the part that is not
rotary stays. Both 8-bit paths (scalar and NEON) turned 2 i and 2 i + 1 by the same angles.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit

Q8 = qgate.Quantizer("int8", granularity="block", block=32)
ROTARY = 16


def turned(first: Tensor, second: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    steps = torch.arange(ROTARY // 2, dtype=first.dtype) / (ROTARY // 2)
    angles = positions[:, None] * 10_000.0**-steps
    cos, sin = angles.cos(), angles.sin()
    return first * cos - second * sin, second * cos + first * sin


def projected_and_turned(x: Tensor, w: Tensor, positions: Tensor) -> Tensor:
    y = linear(x, w)
    first, second = turned(*y[:, :ROTARY].chunk(2, -1), positions)
    return torch.cat([first, second, y[:, ROTARY:]], -1)


def half_a_head_apart(x: Tensor, w: Tensor, positions: Tensor) -> Tensor:
    return projected_and_turned(x, Q8(w), positions)


def neighbors(x: Tensor, w: Tensor, positions: Tensor) -> Tensor:
    y = linear(x, Q8(w))
    pairs = turned(y[:, :ROTARY:2], y[:, 1:ROTARY:2], positions)
    return torch.cat([torch.stack(pairs, -1).flatten(1), y[:, ROTARY:]], -1)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    w = torch.randn(32, 64, generator=generator) / 8
    return torch.randn(8, 64, generator=generator), w, torch.arange(3.0, 11.0)


EXHIBIT = Exhibit(
    "ohdearquant/lattice#392",
    "positions",
    "RoPE of the 8-bit path rotated neighboring channels instead of halves of a head.",
    "the same fault had cost 0.77 in perplexity elsewhere",
    r"column 0 of the result depends on rows 0 to 1 of argument 1, the reference.s on rows 0, 8",
    arguments, half_a_head_apart, neighbors, projected_and_turned, {1: Q8},
    options={"relations": ["one"]},
)  # fmt: skip
