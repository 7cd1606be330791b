"""Several tokens after a cached prefix went through Mamba-2's path for one token.

Whether to take a single step was decided by the cache alone: it held a state. So a chunk of a
prompt, or the tokens of a draft, moved the state by their first token, and the others were lost.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.museum.exhibit import Exhibit


def scanned(state: Tensor, a: Tensor, x: Tensor) -> Tensor:
    """Return the state [request, channel, state] after all tokens of a chunk."""
    for token in range(x.shape[1]):
        state = state * a[:, token, :, None] + x[:, token]
    return state


def one_step(state: Tensor, a: Tensor, x: Tensor) -> Tensor:
    return state * a[:, 0, :, None] + x[:, 0]


def by_blocks(state: Tensor, a: Tensor, x: Tensor) -> Tensor:
    """Weigh every token by the decays after it, as kernels of whole chunks do."""
    after = a.log().flip(1).cumsum(1).flip(1)
    later = torch.cat([after[:, 1:], torch.zeros_like(after[:, :1])], 1)
    return state * after[:, 0, :, None].exp() + (x * later[..., None].exp()).sum(1)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    a = torch.rand(3, 8, 12, generator=generator) * 0.2 + 0.8
    state = torch.randn(3, 12, 16, generator=generator)
    return state, a, torch.randn(3, 8, 12, 16, generator=generator) / 4


EXHIBIT = Exhibit(
    "huggingface/transformers#46032",
    "caches",
    "Only the first of several tokens after a cached prefix changed the state.",
    "wrong results without an error",
    "the result depends on row 0 of argument 1, the reference.s on rows 0 to 7",
    arguments, by_blocks, one_step, scanned, options={"relations": ["permuted"]},
)  # fmt: skip
