"""Experts that calibration never routed a token to got NaN for a scale of their inputs.

A flag that sends all tokens through all experts was accepted and handed to nobody. An expert without
a token has no largest input, so the global scale of its NVFP4 inputs is NaN.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.museum import fp4
from tests.museum.exhibit import Exhibit

EXPERTS = 8
CALIBRATION = torch.randn(6, 64, generator=torch.Generator().manual_seed(5))
ROUTES = torch.tensor([0, 1, 2, 4, 6, 7, 0, 4, 1, 2, 7, 6]).reshape(6, 2)


def largest_inputs(calibrate_all_experts: bool) -> Tensor:
    routed = [CALIBRATION[(expert == ROUTES).any(1)] for expert in range(EXPERTS)]
    seen = [CALIBRATION] * EXPERTS if calibrate_all_experts else routed
    return torch.stack([x.abs().max() if len(x) else torch.tensor(torch.nan) for x in seen])


def nvfp4(x: Tensor, largest: Tensor) -> Tensor:
    tensor_scale = (largest / (6 * 448)).reshape(-1, 1, 1, 1)
    blocks = x.unflatten(-1, (-1, 16))
    exact = (blocks.abs().amax(-1, keepdim=True) / 6 / tensor_scale).clamp(2**-9, 448)
    scale = exact.to(torch.float8_e4m3fn).float() * tensor_scale
    ratios = blocks / scale
    return (fp4.nearest(ratios) * scale).flatten(2)


def experts(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("etk,enk->etn", x, w)


def all_experts(x: Tensor, w: Tensor) -> Tensor:
    return experts(nvfp4(x, largest_inputs(calibrate_all_experts=True)), w)


def routed_experts(x: Tensor, w: Tensor) -> Tensor:
    return experts(nvfp4(x, largest_inputs(calibrate_all_experts=False)), w)


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    x, w = (torch.randn(EXPERTS, rows, 64, generator=generator) for rows in (12, 16))
    return x, w / 8


EXHIBIT = Exhibit(
    "vllm-project/llm-compressor#2826", "calibration",
    "Experts without calibration tokens got NaN for the scale of their inputs.",
    "an option that was accepted and never wired up; corrupted experts",
    "results are NaN where finite ones are expected: 2 of 8 indices .* .3, 5",
    arguments, all_experts, routed_experts, experts,
    {0: lambda x: nvfp4(x, largest_inputs(calibrate_all_experts=True))}, options={"relations": []},
)  # fmt: skip
