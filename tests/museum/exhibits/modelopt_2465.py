"""A checkpoint said that its blocks are 4over6, and none had chosen.

The flag of 4over6 normalizes block scales by 256 in place of 448, so that a block may take one half
as large again; the choice itself came from two multipliers of the calibration, in another part of
the recipe. The flag alone raised nothing: scales have the room, and each block is mapped to 6.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

from tests.museum.exhibit import Exhibit
from tests.museum.fp4 import nearest

SIX = torch.tensor(6.0)


def candidate(blocks: Tensor, amax: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return blocks on E2M1 under a scale times a factor, and the sums of their squared errors."""
    encode = 256 * SIX / amax
    stored = blocks.abs().amax(2, keepdim=True) / SIX * encode * factor
    stored = stored.clamp(max=448).to(torch.float8_e4m3fn).float()
    scale = stored * (1 / encode)
    codes = nearest(blocks * (1 / scale))
    errors = (codes * stored * amax / (256 * SIX) - blocks).square()
    return codes * scale, torch.stack(errors.unbind(2)).cumsum(0)[-1][..., None]


def calibrated(w: Tensor, multipliers: tuple[float, ...]) -> Tensor:
    """Take for each block the multiplier with the smallest error."""
    best, least = candidate(w.unflatten(1, (-1, 16)), w.abs().max(), 1.0)
    for multiplier in multipliers:
        values, error = candidate(w.unflatten(1, (-1, 16)), w.abs().max(), multiplier)
        best, least = values.where(error < least, best), error.minimum(least)
    return best.flatten(1)


def flag_and_multipliers(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, calibrated(w, (1.5,)))


def flag_alone(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, calibrated(w, ()))


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(32, 128, generator=generator), torch.randn(48, 128, generator=generator) / 8


EXHIBIT = Exhibit(
    "NVIDIA/Model-Optimizer#2465", "checkpoints",
    "Scales left room for blocks mapped to 4, and no block was: 4over6 was set in one place of two.",
    "both directions failed silently",
    "argument 1 has all blocks with their largest at 6: none chooses",
    arguments, flag_and_multipliers, flag_alone, linear, {1: "nvfp4_4over6_mse_256"},
    options={"relations": []}, terms=128,
)  # fmt: skip
