"""Attention of a reference computed in a known arithmetic, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qgate.arithmetics.known import KnownAttention


Paused = Callable[[], AbstractContextManager[None]]
"""Lets operators pass that are not those of a reference."""


@dataclass(frozen=True)
class KnownRule:
    """A known arithmetic of attention, and how it cuts the keys; `tile` 0 takes all at once."""

    attention: KnownAttention
    dtype: torch.dtype
    tile: int
    descending: bool

    def words(self) -> str:
        return self.attention.with_tile(self.tile, self.descending, self.tile + 1)


@dataclass(frozen=True)
class AttentionSides:
    """Queries, keys and values of attention, a head of keys for each of queries, and a mask."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    mask: Tensor | None

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> AttentionSides:  # fmt: skip
        """Settle the arguments of torch's scaled_dot_product_attention."""
        if dropout_p:
            raise ValueError("attention with dropout draws random numbers")
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key, value = (side.repeat_interleave(times, -3) for side in (key, value))
        if is_causal:
            shape = query.shape[-2], key.shape[-2]
            attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        return cls(query, key, value, scale, attn_mask)

    def exact(self) -> Tensor:
        """Return attention by the operators that define it."""
        scores = (self.query @ self.key.mT) * self.scale
        if self.mask is not None and self.mask.dtype is torch.bool:
            scores = scores.masked_fill(~self.mask, -math.inf)
        elif self.mask is not None:
            scores = scores + self.mask
        return scores.softmax(-1) @ self.value

    def by_rule(self, rule: KnownRule, paused: Paused) -> Tensor:
        """Return attention as a known arithmetic computes it, which knows its gradients too."""
        result: Tensor = _Known.apply(  # type: ignore[no-untyped-call]
            self.query, self.key, self.value, self.scale, self.mask, rule, paused
        )
        return result


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *settled: Any) -> Tensor:
        query, key, value, scale, mask, rule, paused = settled
        ctx.save_for_backward(query, key, value)
        ctx.rest = scale, mask, rule, paused
        with paused():
            result: Tensor = rule.attention.values(
                query, key, value, scale, mask, rule.dtype, rule.tile, rule.descending
            )
            return result.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sides = ctx.saved_tensors
        scale, mask, rule, paused = ctx.rest
        with paused():
            gradients = rule.attention.gradients(
                *sides, grads[0], scale, mask, rule.dtype, rule.tile, rule.descending
            )
            of_sides = [gradient.to(sides[0].dtype) for gradient in gradients]
        return (*of_sides, None, None, None, None)
