"""Experts were weighted by raw logits where the router's probabilities are not renormalized.

The softmax stood in the branch of `renormalize=True`. Without it the top-k logits themselves were
packed for the kernel of experts, which applies them as they are.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.museum.exhibit import Exhibit, Tolerance

ASKED = 4


def weights(logits: Tensor) -> Tensor:
    return logits.softmax(-1).topk(ASKED).values


def probabilities(logits: Tensor) -> Tensor:
    return weights(logits)


def raw_logits(logits: Tensor) -> Tensor:
    return logits.topk(ASKED).values


def arguments(generator: Generator) -> tuple[Tensor]:
    return (torch.randn(12, 32, generator=generator) * 2,)


EXHIBIT = Exhibit(
    "sgl-project/sglang#35160",
    "experts",
    "Experts were weighted by their logits: without renormalization there was no softmax.",
    "weights off by about 5.0",
    "the result is the logarithm of the expected one up to a number per row: no softmax",
    arguments, probabilities, raw_logits, weights,
    options={"relations": ["one", "odd"]}, tolerance=Tolerance(0, 0, "right"),
)  # fmt: skip
