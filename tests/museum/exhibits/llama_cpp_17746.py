"""The values of one model overflowed the float16 that flash attention adds them up in.

Scores are taken off the largest one, so weights go up to 1, and sums of many of them times large
values go beyond 65,504. With ln 8 added to the largest score all sums are 8 times smaller; the
division by the sum of weights takes that out again.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.museum.exhibit import Exhibit

AT_ONCE = 32


def flash(q: Tensor, k: Tensor, v: Tensor, offset: float) -> Tensor:
    """Attend with sums of values in float16, [head, token, channel]."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    weights = torch.exp(scores - scores.amax(-1, keepdim=True) - offset)
    total = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float16)
    for first in range(0, k.shape[-2], AT_ONCE):
        part = slice(first, first + AT_ONCE)
        total += (weights[..., part] @ v[..., part, :]).half()
    return total.float() / weights.sum(-1, keepdim=True)


def eight_times_smaller(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash(q, k, v, math.log(8))


def as_they_are(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash(q, k, v, 0.0)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, n, 32, generator=generator) for n in (4, 256, 256))
    v[..., 5] += 1200
    return q / 4, k, v


EXHIBIT = Exhibit(
    "ggml-org/llama.cpp#17746",
    "accumulation",
    "The values of flash attention overflowed their float16 sums.",
    "overflow in one model; the fix adds ln 8 to the largest score",
    "8 of 256 results are Inf where finite ones are expected: column 5 of 32",
    arguments, eight_times_smaller, as_they_are, scaled_dot_product_attention,
    options={"relations": ["one"], "arithmetic": "float16"},
)  # fmt: skip
