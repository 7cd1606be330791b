"""Experts that no token of the calibration set was routed to got a NaN for their input scale.

`moe_calibrate_all_experts` was accepted and never handed on, so experts saw their routed tokens
alone. The largest value of no tokens is NaN, and so is the global scale that is made of it.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import qgate
from tests.museum.exhibit import Exhibit

SEEN = torch.randn(24, 64, generator=torch.Generator().manual_seed(0)) * 2
ROUTED_TO = torch.arange(24) % 3
"""Expert 3 is not asked by any token."""


def nvfp4(x: Tensor, amax: Tensor) -> Tensor:
    """Quantize with a global scale that was calibrated."""
    unit = 448 * 6 / amax
    blocks = x.reshape(-1, 16)
    scales = (blocks.abs().amax(1, keepdim=True) / 6 * unit).to(torch.float8_e4m3fn).float() / unit
    return (qgate.quantize(blocks / scales, "e2m1") * scales).reshape(x.shape)


def calibrated_on_all(x: Tensor) -> Tensor:
    return nvfp4(x, SEEN.abs().amax())


def product(x: Tensor, w: Tensor) -> Tensor:
    """Multiply the tokens of each expert [expert, token, k] by its weights."""
    return torch.einsum("emk,enk->emn", x, w)


def all_tokens(x: Tensor, w: Tensor) -> Tensor:
    return product(calibrated_on_all(x), qgate.quantize(w, "nvfp4"))


def routed_tokens(x: Tensor, w: Tensor) -> Tensor:
    expert_tokens = [SEEN[expert == ROUTED_TO] for expert in range(len(x))]
    nothing = torch.tensor(torch.nan)
    amax = [tokens.abs().amax() if len(tokens) else nothing for tokens in expert_tokens]
    return product(torch.stack(list(map(nvfp4, x, amax))), qgate.quantize(w, "nvfp4"))


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 6, 64, generator=generator)
    return x, torch.randn(4, 8, 64, generator=generator) / 8


EXHIBIT = Exhibit(
    "vllm-project/llm-compressor#2826", "experts",
    "Experts without a token in the calibration set got NaN for their input scale.",
    "NaN `input_global_scale`, corrupted experts",
    r"48 of 192 results are NaN where finite ones are expected: index 3 of 4 in dimension 0",
    arguments, all_tokens, routed_tokens, product, {0: calibrated_on_all, 1: "nvfp4"},
    options={"relations": ["one"]}, terms=64,
)  # fmt: skip
