"""E8M0 scales were rounded to the nearest power of two, so the largest elements saturated.

The scale of a block is its largest magnitude over 448. Rounded down, the block's largest elements
lie beyond the format's largest number and are cut off there. The right way rounds scales up, as
the same library does on another backend.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

from tests.museum.exhibit import Exhibit


def cast(x: Tensor, round_exponent: object) -> Tensor:
    blocks = x.reshape(len(x), -1, 32)
    exponents = torch.log2(blocks.abs().amax(2, keepdim=True) / 448)
    scales = torch.exp2(round_exponent(exponents))  # type: ignore[operator]
    codes = (blocks / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scales).reshape(x.shape)


def rounded_up(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, cast(w, torch.ceil))


def rounded_to_nearest(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, cast(w, torch.round))


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 128, generator=generator), torch.randn(32, 128, generator=generator) / 11


EXHIBIT = Exhibit(
    "ml-explore/mlx#4353",
    "scales",
    "Scales were rounded to the nearest power of two, and the largest elements saturated.",
    "243 of 512 blocks lost more than 6.25 % of their largest element, the worst 29.27 %",
    "argument 1 has scales rounded to the nearest power of two: its largest values saturate",
    arguments, rounded_up, rounded_to_nearest, linear, {1: "mxfp8"},
    options={"relations": ["one"]}, terms=128,
)  # fmt: skip
