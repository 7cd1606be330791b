"""The cache of a decoder: keys and values of the tokens so far, layer by layer.

A layer's cache is written with the keys and values of new tokens, and attended to by their queries:
`write`, then `attend`. Both take tensors without rotary positions, (batch, heads, tokens, width);
the cache turns them by the positions that follow the tokens it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qgate.errors import QgateError

Rope = Callable[[Tensor, int], Tensor]
"""Rotates (batch, heads, tokens, width) by position, given that of the first token."""


class LayerCache(Protocol):
    """Keys and values of one attention layer."""

    @property
    def length(self) -> int: ...

    def write(self, keys: Tensor, values: Tensor) -> None: ...

    def attend(self, queries: Tensor) -> Tensor: ...

    def reset(self) -> None: ...


class PlainCache:
    """Keys, after rotary positions, and values of one layer, as they are."""

    def __init__(self, rope: Rope) -> None:
        self.rope = rope
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Add the keys and values of new tokens."""
        turned = self.rope(keys, self.length)
        if self.keys is None or self.values is None:
            self.keys, self.values = turned, values
            return
        if len(keys) != len(self.keys):
            raise QgateError(
                f"a cache of {len(self.keys)} sequences cannot take tokens of {len(keys)}: give "
                "each batch a cache of its own."
            )
        self.keys = torch.cat([self.keys, turned], 2)
        self.values = torch.cat([self.values, values], 2)

    def attend(self, queries: Tensor) -> Tensor:
        """Return the context of the tokens that were written last."""
        if self.keys is None or self.values is None:
            raise QgateError(
                "an empty cache has nothing to attend to: write keys and values first."
            )
        count, length = queries.shape[2], self.length
        turned = self.rope(queries, length - count)
        shared = queries.shape[1] // self.keys.shape[1]
        keys, values = (side.repeat_interleave(shared, 1) for side in (self.keys, self.values))
        visible = causal_mask(count, length, queries.device)
        return scaled_dot_product_attention(turned, keys, values, attn_mask=visible)

    def reset(self) -> None:
        """Forget all tokens."""
        self.keys = self.values = None


def causal_mask(count: int, length: int, device: torch.device) -> Tensor:
    """Return which of `length` tokens each of the last `count` sees, (count, length)."""
    queries = torch.arange(length - count, length, device=device)
    return torch.arange(length, device=device) <= queries.unsqueeze(1)


def cached_tokens(cache: Sequence[LayerCache]) -> int:
    """Return how many tokens a cache holds; layers that disagree are an error."""
    lengths = {layer.length for layer in cache}
    if len(lengths) != 1:
        raise QgateError(
            f"the layers of a cache hold {sorted(lengths)} tokens; they hold the same number. Make "
            "a new one: network.new_cache()."
        )
    return lengths.pop()
