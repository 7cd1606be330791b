"""A block of zeros was divided by its scale, which is zero, too.

The scale was the largest magnitude over 448, with nothing below it. Zeros over zero are NaN, and so
is the product of every row that has such a block; one zeroed row in a normal tensor is enough.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import qgate
from tests.museum.exhibit import Exhibit

BY_ROW = qgate.Quantizer("fp8_e4m3", granularity="channel", axis=0)


def cast(x: Tensor, smallest: float) -> Tensor:
    scales = (x.abs().amax(1, keepdim=True) / 448).clamp_min(smallest)
    return (x / scales).to(torch.float8_e4m3fn).float() * scales


def scale_with_a_floor(x: Tensor) -> Tensor:
    return cast(x, torch.finfo(torch.float32).smallest_normal)


def scale_of_zero(x: Tensor) -> Tensor:
    return cast(x, 0.0)


def arguments(generator: Generator) -> tuple[Tensor]:
    return (torch.randn(16, 64, generator=generator),)


EXHIBIT = Exhibit(
    "pytorch/ao#4713",
    "scales",
    "Zeros were divided by a scale of zero.",
    "an all-zero tensor quantizes to NaN, and decodes to NaN",
    "for zero rows .*64 of 1,024|for zero rows .*results are NaN where finite ones are expected",
    arguments, scale_with_a_floor, scale_of_zero, lambda x: x, output=BY_ROW,
    options={"relations": ["one", "zero rows"]}, terms=0,
)  # fmt: skip
