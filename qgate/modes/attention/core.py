"""Attention over a quantized cache: tokens are stored one by one, and every query reads them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from qgate.errors import QgateError
from qgate.models.kv_cache import Rope, causal_mask
from qgate.modes.attention.casting import StoredSide
from qgate.modes.attention.choices import AttentionChoices
from qgate.modes.attention.sources import LatentSource

_FIRST_CAPACITY = 64


def exact_mask(choices: AttentionChoices, count: int, length: int, device: torch.device) -> Tensor:
    """Return which of `length` tokens each of the last `count` reads as they are."""
    queries = torch.arange(length - count, length, device=device).unsqueeze(1)
    tokens = torch.arange(length, device=device)
    return (tokens < choices.sinks) | (tokens > queries - choices.window)


class Attend(nn.Module):
    """Softmax attention of the last tokens over what the cache holds."""

    def __init__(self, weights: StoredSide, scaling: float | None = None, cap: float = 0.0) -> None:
        super().__init__()
        self.scaling, self.cap = scaling, cap
        self.softmax = nn.Softmax(-1)
        self.weights = weights

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        exact_keys: Tensor | None = None,
        exact_values: Tensor | None = None,
        exact: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Return the context; where `exact` is true a query reads the exact keys and values."""
        batch, heads, count, width = queries.shape
        # Queries that share a head of keys stand below each other.
        grouped = queries.reshape(batch, keys.shape[1], -1, width)
        shared = heads // keys.shape[1]
        scaling = 1 / math.sqrt(width) if self.scaling is None else self.scaling
        exact = None if exact is None else exact.repeat(shared, 1)
        scores = grouped @ keys.transpose(-1, -2)
        if exact is not None and exact_keys is not None:
            scores = torch.where(exact, grouped @ exact_keys.transpose(-1, -2), scores)
        scores = scores * scaling
        if self.cap:
            scores = (scores / self.cap).tanh() * self.cap
        if visible is None and count > 1:
            visible = causal_mask(count, keys.shape[2], queries.device)
        if visible is not None:
            scores = scores.masked_fill(~visible.repeat(shared, 1), -math.inf)
        weights: Tensor = self.weights(self.softmax(scores.float()).to(queries.dtype))
        if exact is not None and exact_values is not None:
            context = weights.masked_fill(exact, 0) @ values
            context = context + weights.masked_fill(~exact, 0) @ exact_values
        else:
            context = weights @ values
        return context.reshape(batch, heads, count, -1)


class Join(nn.Module):
    """Keys and values that queries read, of what the cache has: of latents those of the heads.

    plain  the width of keys without positions, which a latent gives
    """

    def __init__(self, plain: int = 0) -> None:
        super().__init__()
        self.plain = plain

    def forward(
        self, keys: Tensor, values: Tensor, of_heads: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if of_heads is None:
            return keys, values
        plain, heads_values = of_heads.tensor_split([self.plain], -1)
        return torch.cat([keys.expand(-1, plain.shape[1], -1, -1), plain], -1), heads_values


class AttentionCore(nn.Module):
    """The quantized part of one attention: casts of keys and values, and what reads them."""

    def __init__(
        self,
        choices: AttentionChoices,
        sides: Mapping[str, StoredSide],
        rope: Rope,
        scaling: float | None = None,
        window: int = 0,
        cap: float = 0.0,
    ) -> None:
        super().__init__()
        self.choices, self.rope, self.window = choices, rope, window
        self.keys, self.values = sides["keys"], sides["values"]
        self.queries, self.output = sides["queries"], sides["output"]
        self.join = Join()
        self.attend = Attend(sides["weights"], scaling, cap)
        self._own = QuantizedCache(self)

    def sources(self, keys: Tensor, start: int) -> Tensor:
        """Return what is quantized of keys without positions: turned ones, or they themselves."""
        return keys if self.choices.before_rope else self.rope(keys, start)

    def whole(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the context of a whole text at once, through which gradients go."""
        sides = self.stored_sides(self.sources(keys, 0), values)
        return self.output(self.read(self.queries(self.rope(queries, 0)), sides))  # type: ignore[no-any-return]

    def stored_sides(self, sources: Tensor, values: Tensor) -> list[Tensor]:
        """Return what a cache keeps of new tokens: quantized keys and values, and exact ones."""
        sides = [self.keys(sources), self.values(values)]
        return [*sides, sources, values] if self.choices.keeps_some else sides

    def read(self, queries: Tensor, sides: Sequence[Tensor]) -> Tensor:
        """Return the context of turned queries over what a cache keeps."""
        keys, values, *more = sides
        exact, of_heads = (more[:2], more[2:]) if self.choices.keeps_some else ([], more)
        if self.choices.before_rope:
            keys = self.rope(keys, 0)
            exact = [self.rope(exact[0], 0), exact[1]] if exact else []
        stored = self.join(keys, values, *of_heads[:1])
        originals = self.join.forward(*exact, *of_heads[1:]) if exact else (None, None)
        return self._attend(queries, *stored, *originals)

    def decode(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        chunks: Sequence[int] | None = None,
        cache: QuantizedCache | None = None,
    ) -> Tensor:
        """Return the context of a text that an empty cache takes token by token, or in chunks.

        Casts see each token by itself, so that those of a whole text are made at once.
        """
        cache, length = cache or self._own, queries.shape[2]
        cache.reset()
        turned = self.queries(self.rope(queries, 0))
        sides = self.stored_sides(self.sources(keys, 0), values)
        context, start = [], 0
        for count in chunks or [1] * length:
            part = slice(start, start + count)
            cache.store(*(side[:, :, part] for side in sides))
            context.append(cache.read(turned[:, :, part]))
            start += count
        return self.output(torch.cat(context, 2))  # type: ignore[no-any-return]

    def _attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        exact_keys: Tensor | None,
        exact_values: Tensor | None,
    ) -> Tensor:
        count, length = queries.shape[2], keys.shape[2]
        seen = {"visible": self.visible(count, length, keys.device)} if self.window else {}
        if not self.choices.keeps_some:
            return self.attend(queries, keys, values, **seen)  # type: ignore[no-any-return]
        exact = exact_mask(self.choices, count, length, keys.device)
        return self.attend(queries, keys, values, exact_keys, exact_values, exact, **seen)  # type: ignore[no-any-return]

    def visible(self, count: int, length: int, device: torch.device) -> Tensor:
        """Return which of `length` tokens each of the last `count` queries sees."""
        visible = causal_mask(count, length, device)
        if self.window:
            queries = torch.arange(length - count, length, device=device).unsqueeze(1)
            visible &= torch.arange(length, device=device) > queries - self.window
        return visible


class LatentCore(AttentionCore):
    """The quantized part of an attention whose cache has latents, and RoPE parts of the keys."""

    def __init__(self, source: LatentSource, *args: Any) -> None:
        super().__init__(*args)
        self._source = [source]
        self.join = Join(int(source.module.qk_nope_head_dim))

    def stored_sides(self, sources: Tensor, values: Tensor) -> list[Tensor]:
        """Add keys and values of the heads, made once of each latent."""
        sides, up = super().stored_sides(sources, values), self._source[0].module.kv_b_proj
        of_heads = [up(sides[1])]
        for latents in sides[3:]:
            exact = linear(latents, up.weight)
            if exact.requires_grad:
                # Gradients go through the projection once, where those of quantized latents go.
                exact = of_heads[0] + (exact - of_heads[0]).detach()
            of_heads.append(exact)
        heads = self._source[0].heads
        return sides + [x[:, 0].unflatten(-1, (heads, -1)).transpose(1, 2) for x in of_heads]


class QuantizedCache:
    """Keys and values of one attention as a mode stores them, in memory that is used again.

    Tokens that stay as they are for a while are kept beside their quantized ones.
    """

    def __init__(self, core: AttentionCore) -> None:
        self._core = [core]
        self._length = 0
        self._memory: list[Tensor] = []

    @property
    def core(self) -> AttentionCore:
        return self._core[0]

    def __deepcopy__(self, memo: dict[int, object]) -> QuantizedCache:
        """Copy the tokens; an attention has its casts once."""
        copied = QuantizedCache(self.core)
        copied._length, copied._memory = self._length, copy.deepcopy(self._memory, memo)
        return copied

    @property
    def length(self) -> int:
        return self._length

    def reset(self) -> None:
        """Forget all tokens; the memory is written again by the next ones."""
        self._length = 0

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Quantize the keys, without positions, and the values of new tokens, and store them."""
        self.store(*self.core.stored_sides(self.core.sources(keys, self.length), values))

    def attend(self, queries: Tensor) -> Tensor:
        """Return the context of queries without positions, those of the last tokens."""
        turned = self.core.queries(self.core.rope(queries, self.length - queries.shape[2]))
        return self.core.output(self.read(turned))  # type: ignore[no-any-return]

    def store(self, *sides: Tensor) -> None:
        """Store quantized keys and values of new tokens, and what else is kept of them."""
        self._reserve(sides)
        end = self._length + sides[0].shape[2]
        for memory, side in zip(self._memory, sides, strict=True):
            memory[:, :, self._length : end] = side
        self._length = end

    def read(self, queries: Tensor) -> Tensor:
        """Return the context of turned queries, those of the last tokens."""
        return self.core.read(queries, [memory[:, :, : self._length] for memory in self._memory])

    def _reserve(self, sides: Sequence[Tensor]) -> None:
        """Make room for new tokens, twice as much as before."""
        first, needed = sides[0], self._length + sides[0].shape[2]
        if self._memory and self._length and len(first) != len(self._memory[0]):
            raise QgateError(
                f"a cache of {len(self._memory[0])} sequences cannot take tokens of {len(first)}: "
                "give each batch a cache of its own."
            )
        fits = self._memory and len(first) == len(self._memory[0])
        if fits and needed <= self._memory[0].shape[2] and first.dtype == self._memory[0].dtype:
            return
        capacity = max(_FIRST_CAPACITY, 2 * needed)
        memory = [
            side.new_zeros((len(side), side.shape[1], capacity, side.shape[3])) for side in sides
        ]
        for new, old in zip(memory, self._memory, strict=False):
            new[:, :, : self._length] = old[:, :, : self._length] if self._length else 0
        self._memory = memory
