"""The weights of the experts that a token asks did not add up to one.

The router took the sigmoid of all scores and the largest of them, and left out the division by
their sum that the checkpoint was trained with. The report names no format; the one here is ours.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import qgate
from tests.museum.exhibit import Exhibit

ASKED = 2


def mixed(x: Tensor, logits: Tensor, w: Tensor, *, normalize: bool = True) -> Tensor:
    weights, experts = logits.sigmoid().topk(ASKED)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    expert_outputs = torch.einsum("tk,enk->ten", x, w)
    chosen_outputs = expert_outputs.gather(
        1, experts[:, :, None].expand(-1, -1, expert_outputs.shape[-1])
    )
    return (weights[:, :, None] * chosen_outputs).sum(1)


def normalized(x: Tensor, logits: Tensor, w: Tensor) -> Tensor:
    return mixed(qgate.quantize(x, "mxfp8"), logits, qgate.quantize(w, "mxfp8"))


def not_normalized(x: Tensor, logits: Tensor, w: Tensor) -> Tensor:
    x, w = qgate.quantize(x, "mxfp8"), qgate.quantize(w, "mxfp8")
    return mixed(x, logits, w, normalize=False)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    x, logits = (torch.randn(10, size, generator=generator) for size in (64, 6))
    return x, logits, torch.randn(6, 16, 64, generator=generator) / 8


EXHIBIT = Exhibit(
    "pytorch/torchtitan#1448",
    "experts",
    "The weights of a token's experts were not divided by their sum.",
    "a very high gradient norm with converted weights",
    "the division by the result of a sum is left out",
    arguments, normalized, not_normalized, mixed, {0: "mxfp8", 2: "mxfp8"},
    options={"relations": ["one", "odd"]},
)  # fmt: skip
