"""A fused activation quantized with the global scale where its reciprocal was meant.

The kernel multiplies by the number that it is given, before it makes block scales; the product after it
multiplies by the global scale. With the same number at both places, results are too small by
the square of the scale, and many block scales are subnormal.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import silu

from tests.museum import fp4
from tests.museum.exhibit import Exhibit


def gated(x: Tensor, y: Tensor) -> Tensor:
    return silu(x) * y


def fused(x: Tensor, y: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return E2M1 elements and E4M3 block scales of the activation times a factor."""
    blocks = gated(x, y).unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1, keepdim=True) / 6 * factor).to(torch.float8_e4m3fn).float()
    ratios = blocks * factor / scales
    return fp4.nearest(ratios), scales


def global_scale(x: Tensor, y: Tensor) -> Tensor:
    return gated(x, y).abs().max() / (6 * 448)


def reciprocal(x: Tensor, y: Tensor) -> Tensor:
    elements, scales = fused(x, y, 1 / global_scale(x, y))
    return (elements * scales).flatten(-2) * global_scale(x, y)


def not_inverted(x: Tensor, y: Tensor) -> Tensor:
    elements, scales = fused(x, y, global_scale(x, y))
    return (elements * scales).flatten(-2) * global_scale(x, y)


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    x, y = (torch.randn(16, 128, generator=generator) * 8 for _ in range(2))
    return x, y


EXHIBIT = Exhibit(
    "vllm-project/vllm#55643",
    "scales",
    "A fused kernel was given the global scale instead of its reciprocal.",
    "wrong output, behind an illegal memory access of the same kernel",
    "the result is quantized with the reciprocal of its tensor scale",
    arguments, reciprocal, not_inverted, gated, output="nvfp4",
    options={"relations": ["one"]}, terms=None,
)  # fmt: skip
