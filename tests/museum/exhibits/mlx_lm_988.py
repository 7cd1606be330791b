"""A decoding kernel wrote the recurrent state back in the dtype of the model after every token.

The kernel computes in float32, as prefill does. The next token starts from what rounding to bfloat16
left. The report also names a clamp of time steps; a maintainer did not see the gibberish.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import qgate
from tests.museum.exhibit import Exhibit

BF16 = qgate.Quantizer("bf16")
TOKENS, CHANNELS, STATES = 15, 8, 4


def decoded(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, stored: torch.dtype = torch.float32
) -> Tensor:
    """Return the outputs of all tokens; `stored` is the dtype of the state between two of them."""
    state = torch.zeros(CHANNELS, STATES, dtype=x.dtype)
    outputs = []
    for token in range(len(x)):
        decay = torch.exp(dt[token, :, None] * a[:, None])
        state = decay * state + (dt[token] * x[token])[:, None] * b[token]
        outputs.append(state @ c[token])
        state = state.to(stored).to(x.dtype)
    return torch.stack(outputs)


def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return decoded(x, dt, a, b, c, x.dtype)


def in_float32(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return decoded(BF16(x), dt, a, b, c)


def in_bfloat16(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return decoded(BF16(x), dt, a, b, c, torch.bfloat16)


def arguments(generator: Generator) -> tuple[Tensor, ...]:
    sizes = ((TOKENS, CHANNELS), (TOKENS, STATES), (TOKENS, STATES))
    x, b, c = (torch.randn(size, generator=generator) for size in sizes)
    dt = torch.rand(TOKENS, CHANNELS, generator=generator) * 0.1
    return x, dt, -torch.rand(CHANNELS, generator=generator), b, c


EXHIBIT = Exhibit(
    "ml-explore/mlx-lm#988",
    "caches",
    "Decoding rounded the recurrent state to BF16 after every token.",
    "output degenerates into gibberish after about 15 tokens",
    "rows 1 to 14 of 15 .to the end. are wrong",
    arguments, in_float32, in_bfloat16, scan, {0: BF16}, terms=0,
    options={"relations": ["one"]},
)  # fmt: skip
