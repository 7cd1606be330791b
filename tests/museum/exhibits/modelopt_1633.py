"""Block scales above the largest E4M3 number were stored as NaN.

After a calibration by error some block scales lay beyond 448. The cast to E4M3 saturates near that
number and makes NaN of what is farther above: four bytes of a checkpoint, of which each spoils a
row.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

from tests.museum import fp4
from tests.museum.exhibit import Exhibit


def to_e4m3(x: Tensor) -> Tensor:
    """Round to E4M3, to NaN from half a step beyond 448."""
    return torch.where(x <= 464, x.to(torch.float8_e4m3fn).float(), torch.nan)


def cast(w: Tensor, largest_scale: float) -> Tensor:
    tensor_scale = 0.75 * w.abs().max() / (6 * 448)
    blocks = w.unflatten(-1, (-1, 16))
    exact = blocks.abs().amax(-1, keepdim=True) / 6 / tensor_scale
    stored = to_e4m3(exact.clamp(max=largest_scale))
    ratios = blocks / (stored * tensor_scale)
    codes = fp4.nearest(ratios)
    return (codes * stored * tensor_scale).flatten(-2)


def clamped(w: Tensor) -> Tensor:
    return cast(w, 448)


def clamped_scales(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, clamped(w))


def unclamped_scales(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, cast(w, torch.inf))


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    w = torch.randn(48, 64, generator=generator).clamp(-3, 3) / 8
    w[17, 40] = 0.6
    return torch.randn(16, 64, generator=generator), w


EXHIBIT = Exhibit(
    "NVIDIA/Model-Optimizer#1633", "calibration",
    "Block scales beyond 448 were cast to E4M3 without a clamp, and became NaN.",
    "4 NaN bytes in two layers of a checkpoint",
    "16 of 768 results are NaN where finite ones are expected: column 17 of 48",
    arguments, clamped_scales, unclamped_scales, linear, {1: clamped},
    options={"relations": []}, terms=64,
)  # fmt: skip
