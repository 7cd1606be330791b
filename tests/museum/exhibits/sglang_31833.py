"""The state that was cached for a prefix was one from an earlier token, of all requests but the first.

The scan of a batch leaves a state at every chunk of the flattened tokens. They were looked up as if
each request had chunks of its own, which is so where a request starts at a multiple of the chunk.
The report has a loss of accuracy; a comment has the cause (2026-07-21), and #37836 is the fix.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.museum.exhibit import Exhibit

CHUNK, DECAY = 4, 0.875
LENGTHS = (6, 5, 9)
STARTS = (0, 6, 11)
WHOLE = [length // CHUNK for length in LENGTHS]
"""Whole chunks of each request."""


def states(x: Tensor) -> Tensor:
    """Return the state [token, channel] before each token of the batch, and after the last."""
    state, listed = torch.zeros_like(x[0]), []
    for token, value in enumerate(x):
        state = state * (token not in STARTS)
        listed.append(state)
        state = state * DECAY + value
    return torch.stack([*listed, state])


def snapshots(x: Tensor) -> Tensor:
    """Return the state of each request after its whole chunks."""
    return states(x)[[first + count * CHUNK for first, count in zip(STARTS, WHOLE, strict=True)]]


def at_their_tokens(x: Tensor) -> Tensor:
    return snapshots(x)


def by_chunks_of_their_own(x: Tensor) -> Tensor:
    chunks = states(x)[::CHUNK]
    before = [sum(WHOLE[:request]) for request in range(len(WHOLE))]
    return chunks[[first + count for first, count in zip(before, WHOLE, strict=True)]]


def arguments(generator: Generator) -> tuple[Tensor]:
    return (torch.randn(sum(LENGTHS), 16, generator=generator),)


EXHIBIT = Exhibit(
    "sgl-project/sglang#31833",
    "caches",
    "Cached states of a batch were looked up as if each request had chunks of its own.",
    "errors of 104 % and 214 % of the second and third request, 0 of the first",
    "row 1 of the result depends on rows 6 to 7 of argument 0, the reference.s on rows 6 to 9",
    arguments, at_their_tokens, by_chunks_of_their_own, snapshots, options={"relations": ["one"]},
)  # fmt: skip
