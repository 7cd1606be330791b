"""Ranks of expert parallelism other than the first dropped all of their tokens.

A rank's kernel looks experts up by their numbers on the rank, and was handed the model's numbers.
On the first rank both are the same; on the others they lie outside and mean: not of this rank. The
format is ours.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import qgate
from tests.museum.exhibit import Exhibit

RANKS = 4


def mixed(x: Tensor, w: Tensor, experts: Tensor) -> Tensor:
    """Add up what the experts [token, asked] make of each token; `w` is [expert, n, k]."""
    return torch.einsum("tk,tank->tn", x, w[experts])


def summed_over_ranks(x: Tensor, w: Tensor, experts: Tensor, *, shifted: bool = True) -> Tensor:
    x, w = qgate.quantize(x, "mxfp8"), qgate.quantize(w, "mxfp8")
    count = len(w) // RANKS
    y = x.new_zeros(len(x), w.shape[1])
    for rank in range(RANKS):
        numbers = experts - rank * count if shifted else experts
        first = 0 if shifted else rank * count
        for expert in range(first, first + count):
            if expert < count:
                is_routed = (numbers == expert).sum(1, keepdim=True)
                y += is_routed * (x @ w[rank * count + expert].T)
    return y


def numbers_of_the_rank(x: Tensor, w: Tensor, experts: Tensor) -> Tensor:
    return summed_over_ranks(x, w, experts)


def numbers_of_the_model(x: Tensor, w: Tensor, experts: Tensor) -> Tensor:
    return summed_over_ranks(x, w, experts, shifted=False)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(6, 64, generator=generator)
    w = torch.randn(8, 16, 64, generator=generator) / 8
    return x, w, torch.tensor([[2, 0], [3, 1], [0, 5], [5, 1], [2, 7], [7, 0]])


EXHIBIT = Exhibit(
    "vllm-project/vllm-gaudi#1796",
    "experts",
    "All ranks of expert parallelism but the first took global expert numbers for local ones.",
    "288 experts on 4 ranks: generation collapses to a repeated token",
    "row 0 of the result depends on entry 0 of dimension 0 of argument 1, the reference.s on .* 0, 2",
    arguments, numbers_of_the_rank, numbers_of_the_model, mixed, {0: "mxfp8", 1: "mxfp8"},
    options={"relations": ["one"]},
)  # fmt: skip
