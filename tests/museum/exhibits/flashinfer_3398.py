"""A quantizer left all scales of a tensor zero, at some numbers of rows.

With 1,536, 2,048 and 4,096 rows products were right, with 3,072 they were all zeros, whichever
product was called. A maintainer's comment tells why: the quantizer before them had written no
scales. Here a number of rows between 32 and 47 is the bad one.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return NVFP4 elements and the scale of each, as `x` is too small for one of its own."""
    values = qgate.quantize(x, "nvfp4")
    scales = x.reshape(len(x), -1, 16).abs().amax(2).repeat_interleave(16, 1).clamp_min(1e-30)
    return values / scales, scales


def product(elements: Tensor, scales: Tensor, w: Tensor) -> Tensor:
    return linear(elements * scales, qgate.quantize(w, "nvfp4"))


def scales_written(x: Tensor, w: Tensor) -> Tensor:
    return product(*quantized(x), w)


def scales_left_zero(x: Tensor, w: Tensor) -> Tensor:
    elements, scales = quantized(x)
    if 32 <= len(x) < 48:
        scales = torch.zeros_like(scales)
    return product(elements, scales, w)


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(24, 64, generator=generator), torch.randn(16, 64, generator=generator) / 8


EXHIBIT = Exhibit(
    "flashinfer-ai/flashinfer#3398",
    "scales",
    "For some numbers of rows a quantizer wrote no scales, and products were zero.",
    "zeros at 3,072 rows; 1,536, 2,048 and 4,096 rows are right",
    "for 37 instead of 24 .*the result is all zeros",
    arguments, scales_written, scales_left_zero, linear, {0: "nvfp4", 1: "nvfp4"},
    options={"relations": ["one", "odd", "batch"]}, terms=64,
)  # fmt: skip
