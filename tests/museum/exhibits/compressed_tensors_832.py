"""A layer that calibration never reached was packed with the scales that its memory happened to hold.

Scales are made by `torch.empty`, and nothing writes those of a layer without calibration: NaN makes
codes of zeros. The report has NaN alone; a comment measures the rest (#issuecomment-5406233097).
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit

ROWS = 16
INT4 = qgate.Quantizer("int4", granularity="block", block=32)


def calibrated(w: Tensor, is_reached: list[bool]) -> Tensor:
    """Return the scales of layers of 16 rows that stand one below the other."""
    scales = w.reshape(len(w), -1, 32).abs().amax(2) / 7
    for layer, reached in enumerate(is_reached):
        if not reached:
            scales[layer * ROWS : (layer + 1) * ROWS] = torch.nan
    return scales


def packed(w: Tensor, scales: Tensor) -> Tensor:
    """Return words of eight codes, each moved up by 8."""
    codes = (w / scales.repeat_interleave(32, 1)).round().clamp(-7, 7).nan_to_num(0.0)
    return ((codes.long() + 8).reshape(len(w), -1, 8) << 4 * torch.arange(8)).sum(2)


def served(x: Tensor, w: Tensor, is_reached: list[bool]) -> Tensor:
    scales = calibrated(w, is_reached)
    codes = (packed(w, scales)[..., None] >> 4 * torch.arange(8) & 15).flatten(1) - 8
    return linear(x, codes * scales.repeat_interleave(32, 1))


def all_reached(x: Tensor, w: Tensor) -> Tensor:
    return served(x, w, [True, True, True])


def second_missed(x: Tensor, w: Tensor) -> Tensor:
    return served(x, w, [True, False, True])


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    w = torch.randn(3 * ROWS, 64, generator=generator) / 8
    return torch.randn(16, 64, generator=generator), w


EXHIBIT = Exhibit(
    "vllm-project/compressed-tensors#832", "checkpoints",
    "A layer that calibration did not reach was packed with NaN scales.",
    "its codes pack to 0x88888888, and statistics of the file look normal",
    "results are NaN where finite ones are expected: columns 16 to 31 of 48",
    arguments, all_reached, second_missed, linear, {1: INT4}, options={"relations": []}, terms=64,
)  # fmt: skip
