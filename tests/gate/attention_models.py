"""Small models with attention of their own, of which one part may be another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import qgate

WIDTH, HEADS, GROUPS, WORDS, TOKENS = 64, 4, 2, 96, 40
Parts = Mapping[str, Callable[..., Any]]
"""By the name of a part of attention, what becomes of it."""


def _same(value: Any) -> Any:
    return value


class Attention(nn.Module):
    """Causal attention of grouped queries with a cap of scores, a window or sinks."""

    def __init__(self, cap: float = 0.0, window: int = 0, has_sinks: bool = False) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, GROUPS * size)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, GROUPS * size), nn.Linear(WIDTH, WIDTH)
        self.cap, self.window, self.size = cap, window, size
        self.sinks = nn.Parameter(torch.randn(HEADS)) if has_sinks else None
        self.parts: Parts = {}

    def part(self, name: str, value: Any) -> Any:
        return self.parts.get(name, _same)(value)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (side.repeat_interleave(HEADS // GROUPS, 1) for side in (k, v))
        q, k, v = self.part("q", q), self.part("k", k), self.part("v", v)
        scores = self.part("scores", q @ k.mT / math.sqrt(self.size))
        if self.cap:
            cap = self.part("cap", self.cap)
            scores = cap * torch.tanh(scores / cap)
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        mask = mask.triu(1 - self.window) if self.window else mask
        scores = scores.masked_fill(~self.part("seen", mask), -torch.inf).float()
        if self.sinks is not None:
            sinks = self.part("sinks", self.sinks.float()).view(-1, 1, 1)
            scores = torch.cat([scores, sinks.expand(len(x), -1, tokens, 1)], -1)
        p = self.parts.get("softmax", functional.softmax)(scores, -1)[..., :tokens]
        mixed = self.part("p", p).to(v.dtype) @ v
        return cast(Tensor, self.o_proj(mixed.to(x.dtype).transpose(1, 2).flatten(2)))


class Layer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(**options)
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return cast(Tensor, x + self.down(functional.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer(**options) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return cast(Tensor, self.head(x))


def attention_model(**options: Any) -> qgate.Model:
    """Return a model whose scores are large enough to matter."""
    torch.manual_seed(0)
    net = Net(**options).eval()
    with torch.no_grad():
        for layer in net.layers:
            attention = cast(Attention, layer.attention)
            for projection in (attention.q_proj, attention.k_proj):
                projection.weight *= 3
    samples = [torch.randint(1, WORDS, (1, TOKENS)) for _ in range(2)]
    return qgate.Model(net, samples, "attention", calibration=samples)


def planted(parts: Parts) -> Callable[[nn.Module], None]:
    """Return what changes parts of the attention in the second layer of a network."""

    def plant(network: nn.Module) -> None:
        cast(Attention, network.get_submodule("layers.1.attention")).parts = parts

    return plant
