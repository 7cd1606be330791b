"""A short chunk of a prompt stored its convolution state in the block that it had read from.

With prefix caching, the state before a chunk may be in a block that others share, the one after it
goes to a block of its own. Chunks shorter than the state wrote to the first: the own block kept what
was in it, and whoever shared the other read a foreign state.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.museum.exhibit import Exhibit

WIDTH = 3


def stored(blocks: Tensor, x: Tensor, initial: int, last: int) -> Tensor:
    """Return the blocks [block, channel, token] after a chunk [channel, token]."""
    state = torch.cat([blocks[initial], x], -1)[:, -WIDTH:]
    return torch.cat([blocks[:last], state[None], blocks[last + 1 :]])


def in_its_own_block(blocks: Tensor, x: Tensor, initial: int, last: int) -> Tensor:
    blocks = blocks.clone()
    blocks[last] = torch.cat([blocks[initial], x], -1)[:, -WIDTH:]
    return blocks


def in_the_shared_block(blocks: Tensor, x: Tensor, initial: int, last: int) -> Tensor:
    target = initial if x.shape[-1] < WIDTH else last
    return in_its_own_block(blocks, x, initial, target)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, int, int]:
    blocks = torch.randn(6, 16, WIDTH, generator=generator)
    return blocks, torch.randn(16, 2, generator=generator), 1, 4


EXHIBIT = Exhibit(
    "vllm-project/vllm#56196",
    "caches",
    "A chunk shorter than the convolution state was stored in the shared block it was read from.",
    "subtly wrong text, or NaN logits and a tail of token 0",
    "argument 3 is taken as 1, not 4",
    arguments, in_its_own_block, in_the_shared_block, stored, options={"relations": ["one"]},
)  # fmt: skip
