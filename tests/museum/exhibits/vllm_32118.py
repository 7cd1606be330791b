"""A new Mamba request with one token of budget was decoded on the state of the slot's last user.

Prefill starts from zeros, decode reads its slot of the cache. A request that gets a single token in
its first step was taken for one that decodes, so it went on from a stale state.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.museum.exhibit import Exhibit


def stepped(states: Tensor, slots: Tensor, is_new: Tensor, a: Tensor, x: Tensor) -> Tensor:
    """Return the states [request, channel, state] after one token of each request."""
    before = torch.where(is_new[:, None, None], 0.0, states[slots])
    return before * a[:, :, None] + x


def from_zeros(states: Tensor, slots: Tensor, is_new: Tensor, a: Tensor, x: Tensor) -> Tensor:
    return stepped(states, slots, is_new, a, x)


def from_the_slot(states: Tensor, slots: Tensor, _is_new: Tensor, a: Tensor, x: Tensor) -> Tensor:
    return states[slots] * a[:, :, None] + x


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    states = torch.randn(8, 12, 16, generator=generator)
    slots, is_new = torch.tensor([5, 0, 3, 6]), torch.tensor([False, True, False, False])
    a = torch.rand(4, 12, generator=generator) * 0.2 + 0.8
    return states, slots, is_new, a, torch.randn(4, 12, 16, generator=generator) / 4


EXHIBIT = Exhibit(
    "vllm-project/vllm#32118",
    "caches",
    "A new request was decoded from the state that another one had left in its slot.",
    "the state corrupts all tokens that follow",
    "argument 2 is not used: read as False everywhere",
    arguments, from_zeros, from_the_slot, stepped, options={"relations": ["one", "permuted"]},
)  # fmt: skip
