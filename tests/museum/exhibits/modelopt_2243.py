"""FP4 codes were made with block scales in float32, and stored beside these rounded to E4M3.

The ONNX exporter divided weights by their exact block scales and wrote E4M3 scales into the graph:
each code is the nearest for another scale than the one that it is decoded with, off by up to one
part in 16. The right way rounds the scales first and quantizes with what is stored.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

from tests.museum import fp4
from tests.museum.exhibit import Exhibit


def exported(w: Tensor, rounded_first: bool) -> tuple[Tensor, Tensor, Tensor]:
    blocks = w.reshape(len(w), -1, 16)
    tensor_scale = w.abs().max() / (6 * 448)
    exact = (blocks.abs().amax(2) / 6 / tensor_scale).clamp(max=448)
    stored = exact.to(torch.float8_e4m3fn)
    used = (stored.float() if rounded_first else exact) * tensor_scale
    return fp4.nearest(blocks / used[..., None]), stored, tensor_scale


def product(x: Tensor, codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
    return linear(x, (codes * (scales.float() * tensor_scale)[..., None]).reshape(len(codes), -1))


def scales_rounded_first(x: Tensor, w: Tensor) -> Tensor:
    return product(x, *exported(w, rounded_first=True))


def scales_rounded_afterwards(x: Tensor, w: Tensor) -> Tensor:
    return product(x, *exported(w, rounded_first=False))


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 64, generator=generator), torch.randn(24, 64, generator=generator) / 8


EXHIBIT = Exhibit(
    "NVIDIA/Model-Optimizer#2243",
    "scales",
    "FP4 codes were made with exact block scales and stored beside E4M3 ones.",
    "exported bytes are now compared with those of the library's eager path",
    "argument 1 is quantized with block scales that are rounded to E4M3 afterwards",
    arguments, scales_rounded_first, scales_rounded_afterwards, linear, {1: "nvfp4"},
    options={"relations": ["one"]}, terms=64,
)  # fmt: skip
