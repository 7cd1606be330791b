"""A small decoder with a cache, a window and a mask, into which faults are planted by name."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import qgate

VOCABULARY, WIDTH, HEADS, WINDOW = 40, 32, 2, 48


class KVCache:
    """Keys, values and positions of the tokens so far, layer by layer."""

    def __init__(self, layers: int) -> None:
        self.layers: list[dict[str, Tensor]] = [{} for _ in range(layers)]

    @property
    def length(self) -> int:
        return self.layers[0]["k"].shape[2] if self.layers[0] else 0


class SmallAttention(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.before: dict[str, Tensor] = {}

    def forward(
        self, hidden: Tensor, positions: Tensor, mask: Tensor | None, past: dict[str, Tensor] | None
    ) -> Tensor:
        q, k, v = (
            layer(hidden).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = turned(q, positions), turned(k, positions)
        start = 0
        if past is not None:
            start = past["k"].shape[2] if past else 0
            if self.fault == "stale cache" and not past and self.before:
                # The pages of the request before are handed on with what they hold.
                past |= {name: x[: len(k), ..., :3, :] for name, x in self.before.items()}
                start = 0
            if past:
                k, v = torch.cat([past["k"], k], 2), torch.cat([past["v"], v], 2)
            if self.fault == "cache shared by rows":
                k = k.clone()
                k[:, :, :start] = k[:1, :, :start]
            past |= {"k": k, "v": v}
            if self.fault == "stale cache" and len(k) == 1:
                self.before = {"k": k.clone(), "v": v.clone()}
        steps = torch.arange(k.shape[2])
        query_steps = steps[-hidden.shape[1] :, None]
        window = WINDOW - (self.fault == "window at borders" and start > 0)
        if self.fault == "window lost with a cache" and start:
            window = k.shape[2]
        allowed = (steps <= query_steps) & (steps > query_steps - window)
        if self.fault == "mask early in decoding" and start:
            allowed = allowed & (steps < query_steps)
        if self.fault == "mask of a piece early" and start and hidden.shape[1] > 1:
            allowed = allowed & (steps < query_steps)
        if self.fault == "window of a batch early" and start and len(hidden) > 4:
            allowed = allowed & (steps > query_steps - 8)
        if self.fault == "window early beyond 128 in a batch" and start > 128 and len(hidden) > 1:
            allowed = allowed & (steps > query_steps - 8)
        if self.fault == "window early from step 12 on" and 12 < k.shape[2] < 24 and start:
            allowed = allowed & (steps > query_steps - 8)
        if self.fault == "future seen":
            allowed = allowed | (steps == query_steps + 1)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        allowed = allowed.expand(len(hidden), 1, -1, -1)
        if self.fault == "padding attended in decoding" and start:
            mask = None
        if mask is not None and self.fault != "padding attended":
            allowed = allowed & mask.bool()[:, None, None, :]
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        if self.fault == "other tile" and k.shape[2] % 32 == 1 and k.shape[2] > 32:
            scores[..., -1, :1] = torch.finfo(scores.dtype).min
        context = scores.softmax(-1) @ v
        return self.o_proj(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate by position."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] / 100.0 ** (torch.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class SmallBlock(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = SmallAttention(fault)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *about: Any) -> Tensor:
        mixed, past = self.attention(self.norm(hidden), *about), about[-1]
        is_dropped = self.attention.fault == "residual dropped in decoding" and past is not None
        hidden = mixed if is_dropped else hidden + mixed
        return hidden + self.down(torch.relu(self.up(self.mlp_norm(hidden))))  # type: ignore[no-any-return]


class SmallDecoder(nn.Module):
    """Token ids to logits; positions come from a table too, so that those off by one show."""

    def __init__(self, fault: str = "", layers: int = 2) -> None:
        super().__init__()
        self.fault = fault
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList(SmallBlock(fault) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.calls = 0
        self.register_buffer("noise", torch.zeros(()), persistent=False)

    def new_cache(self) -> KVCache:
        return KVCache(len(self.layers))

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        start = cache.length if cache is not None else 0
        if position_ids is None or self.fault == "positions off by the padding":
            position_ids = (start + torch.arange(ids.shape[1])).expand(ids.shape)
        if self.fault == "positions anew per chunk":
            position_ids = torch.arange(ids.shape[1]).expand(ids.shape)
        if self.fault == "positions wrap with a cache" and start:
            position_ids = position_ids % 256
        hidden = self.embedding(ids) + self.places(position_ids)
        if self.fault == "leak across rows":
            hidden = hidden + 1e-4 * hidden.mean(0, keepdim=True)
        if self.fault == "random numbers":
            hidden = hidden + 1e-6 * torch.randn_like(hidden)
        self.calls += 1
        if self.fault == "not repeatable":
            hidden = hidden * (1 + self.calls * 2.0**-22)
        if self.fault == "atomic sums":
            random = torch.Generator().manual_seed(self.calls)
            signs = torch.randint(0, 2, hidden.shape, generator=random) * 2.0 - 1.0
            hidden = hidden + 2.0**-24 * hidden * signs
        if self.fault == "counter" and self.calls == 2:
            hidden = hidden * 1.001
        if self.fault == "state of the request before":
            hidden = hidden + self.noise
            self.noise = 1e-5 * hidden.mean()
        for number, layer in enumerate(self.layers):
            past = None if cache is None else cache.layers[number]
            hidden = layer(hidden, position_ids, attention_mask, past)
        return self.head(hidden)  # type: ignore[no-any-return]


def small_model(fault: str = "", seed: int = 0, **options: Any) -> qgate.Model:
    """Return a decoder with random weights and text, with a fault in it."""
    torch.manual_seed(seed)
    network = SmallDecoder(fault, **options)
    texts = [torch.randint(VOCABULARY, (1, 140)) for _ in range(3)]
    return qgate.Model(network, texts, "small", calibration=texts)
