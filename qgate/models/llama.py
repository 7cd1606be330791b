"""A small Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from qgate.errors import QgateError
from qgate.models.kv_cache import LayerCache, PlainCache, cached_tokens


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    d_model: int
    n_layer: int
    heads: int
    kv_heads: int
    d_ff: int
    eps: float = 1e-5
    rope_base: float = 10000.0


class LlamaNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary(
    positions: int, width: int, base: float, device: torch.device, speeds: Sequence[float] = ()
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (positions, width), halves repeated.

    speeds  radians per position of each pair, where the base does not tell them
    """
    even = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    turns = torch.tensor(speeds, device=device) if speeds else base ** (-even / width)
    angles = torch.outer(torch.arange(positions, device=device).float(), turns)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (batch, heads, positions, width) by position."""
    low, high = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-high, low], -1) * sin.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.width = config.d_model // config.heads
        self.base = config.rope_base
        self.q_proj = nn.Linear(config.d_model, config.heads * self.width, bias=False)
        self.k_proj = nn.Linear(config.d_model, config.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(config.d_model, config.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(config.heads * self.width, config.d_model, bias=False)

    def per_head(self, x: Tensor) -> Tensor:
        """View (batch, tokens, features) as (batch, heads, tokens, width)."""
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)  # type: ignore[no-any-return]

    def rope(self, x: Tensor, start: int) -> Tensor:
        """Rotate tokens by position, the first of which is at `start`."""
        cos, sin = rotary(start + x.shape[2], self.width, self.base, x.device)
        return rotate(x, cos[start:], sin[start:])

    def new_cache(self) -> LayerCache:
        """Return an empty cache of this layer."""
        return PlainCache(self.rope)

    def forward(self, hidden: Tensor, cache: LayerCache | None = None) -> Tensor:
        q = self.per_head(self.q_proj(hidden))
        k = self.per_head(self.k_proj(hidden))
        v = self.per_head(self.v_proj(hidden))
        if cache is not None:
            cache.write(k, v)
            context = cache.attend(q)
        else:
            q, k = self.rope(q, 0), self.rope(k, 0)
            shared = self.heads // self.kv_heads
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
            context = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaNorm(config.d_model, config.eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = LlamaNorm(config.d_model, config.eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, cache: LayerCache | None = None) -> Tensor:
        normed = self.input_layernorm(hidden)
        hidden = hidden + (
            self.self_attn(normed) if cache is None else self.self_attn(normed, cache)
        )
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class LlamaBackbone(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.n_layer))
        self.norm = LlamaNorm(config.d_model, config.eps)

    def forward(self, ids: Tensor, cache: Sequence[LayerCache] | None = None) -> Tensor:
        hidden = self.embed_tokens(ids)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden) if cache is None else layer(hidden, cache[number])
        return self.norm(hidden)  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A language model: token ids (batch, tokens) to logits; the head is tied.

    With a cache the ids are those of the tokens that follow the ones it holds.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaBackbone(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def new_cache(self) -> list[LayerCache]:
        """Return an empty cache, which `forward` writes and reads."""
        return [layer.self_attn.new_cache() for layer in self.model.layers]  # type: ignore[union-attr, operator]

    def forward(self, ids: Tensor, cache: Sequence[LayerCache] | None = None) -> Tensor:
        if cache is None:
            return self.lm_head(self.model(ids))  # type: ignore[no-any-return]
        if len(cache) != self.config.n_layer:
            raise QgateError(
                f"a cache of {len(cache)} layers does not fit a model of {self.config.n_layer}: "
                "make it by network.new_cache()."
            )
        cached_tokens(cache)
        return self.lm_head(self.model(ids, cache))  # type: ignore[no-any-return]
