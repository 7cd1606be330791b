"""Rows of a batch-invariant product changed with the batch where K was a power of two.

The report compares rows alone with rows of the whole batch: K of 512, 1,024, 2,048 and 4,096 give
other bits, in BF16 and in FP32, 768 and 3,072 give the same. Why is not told. Here the terms are
added in another order, which is all that a user of the kernel can see.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

from tests.museum.exhibit import Exhibit

BLOCK, ROWS = 64, 128


def added(x: Tensor, w: Tensor, sums: int) -> Tensor:
    """Add up blocks of terms in turn to so many sums, and these at the end."""
    parts = [x.new_zeros(len(x), len(w)) for _ in range(sums)]
    for number, (x_block, right) in enumerate(
        zip(x.split(BLOCK, 1), w.split(BLOCK, 1), strict=True)
    ):
        parts[number % sums] += (x_block[:, None] * right).sum(-1)
    return torch.stack(parts).sum(0) if sums > 1 else parts[0]


def in_one_order(x: Tensor, w: Tensor) -> Tensor:
    return added(x, w, 1)


def by_rows_for_powers_of_two(x: Tensor, w: Tensor) -> Tensor:
    terms = x.shape[1]
    return added(x, w, 2 if terms & (terms - 1) == 0 and len(x) < ROWS else 1)


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 512, generator=generator)
    return x, torch.randn(16, 512, generator=generator) / 22


EXHIBIT = Exhibit(
    "vllm-project/vllm#55131",
    "invariance",
    "Rows of a batch-invariant product changed with the batch where K was a power of two.",
    "broken for K of 512 to 4,096; stable for K that are no powers of two",
    "is not batch-invariant: .* values differ from the example's for the (first|last) of 128",
    arguments, in_one_order, by_rows_for_powers_of_two, linear,
    options={"relations": ["one"], "invariant": True}, terms=512,
)  # fmt: skip
