"""Parts that models of other structures share."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, WORDS = 32, 50


class Attention(nn.Module):
    """Attention of four heads, to the tokens themselves or to others."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None, causal: bool = False) -> Tensor:
        memory = x if memory is None else memory
        query, key, value = (
            layer(tokens).unflatten(-1, (4, -1)).transpose(1, 2)
            for layer, tokens in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.narrow(F.gelu(self.widen(x))))
