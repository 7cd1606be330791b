"""Weights of importance zero made the best scale of a block 0/0.

The scale of a block that is best by importance is a ratio of two sums over its elements. Where
calibration never saw one of them, every importance is zero, and so are both sums. The right way
falls back to equal importance. The report has the zeros and the NaN; #20460 tells how they come
together.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.museum.exhibit import Exhibit

BLOCK = 32
IMPORTANCE = torch.rand(128, generator=torch.Generator().manual_seed(3)) + 0.1
IMPORTANCE[96:] = 0.0
"""Of the input channels; the last 32 have none."""


def cast(w: Tensor, importance: Tensor) -> Tensor:
    """Quantize to 4 bits with the scale of the smallest weighted error for rounded codes."""
    blocks, weights = w.unflatten(-1, (-1, BLOCK)), importance.unflatten(-1, (-1, BLOCK))
    codes = (blocks / blocks.abs().amax(-1, keepdim=True) * 7).round()
    sums = [(weights * part).sum(-1, keepdim=True) for part in (codes * blocks, codes * codes)]
    return (codes * (sums[0] / sums[1])).flatten(-2)


def equal_importance(w: Tensor) -> Tensor:
    is_important = IMPORTANCE.reshape(-1, BLOCK).any(1).repeat_interleave(BLOCK)
    return cast(w, torch.where(is_important, IMPORTANCE, 1.0))


def no_importance(w: Tensor) -> Tensor:
    return cast(w, IMPORTANCE)


def arguments(generator: Generator) -> tuple[Tensor]:
    return (torch.randn(24, 128, generator=generator) / 11,)


EXHIBIT = Exhibit(
    "ggml-org/llama.cpp#8661",
    "calibration",
    "Blocks of weights whose importances are all zero got NaN as their scale.",
    "1,024 zeros among the importances of one tensor; NaN at block 48",
    "768 of 3,072 results are NaN where finite ones are expected: columns 96 to 127 of 128",
    arguments, equal_importance, no_importance, lambda w: w, output=equal_importance,
    options={"relations": []}, terms=0,
)  # fmt: skip
