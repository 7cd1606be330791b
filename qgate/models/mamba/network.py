"""A Mamba-1 language model in plain PyTorch, with the leaf names of Hugging Face's.

Every place where a tensor flows is a module, the scan and the (usually empty) Hadamard transform
included: hooks see all of it, and a part can be replaced from outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu

from qgate.models.mamba.scanning import Scan, Store
from qgate.models.mamba.state import MixerState, check_cache


@dataclass(frozen=True)
class MambaConfig:
    """Sizes of the network; `dt_rank` is ceil(d_model / 16) unless given."""

    vocab_size: int
    d_model: int
    n_layer: int
    d_inner: int
    d_state: int = 16
    d_conv: int = 4
    dt_rank: int = 0
    eps: float = 1e-5
    conv_bias: bool = True
    bias: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        if not self.dt_rank:
            object.__setattr__(self, "dt_rank", math.ceil(self.d_model / 16))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class CausalConv1d(nn.Conv1d):
    """A depthwise convolution over tokens that looks back only; (batch, tokens, channels).

    `store` returns what is kept of tokens for the later ones, given the number of the first.
    """

    ports = ("input",)

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__(channels, channels, width, groups=channels, bias=bias)
        self.store: Store | None = None

    def forward(self, input: Tensor, cache: MixerState | None = None) -> Tensor:
        stored = stored_window(input, self.weight.shape[-1] - 1, self.store, cache)
        return causal_conv(input, self.weight, self.bias, stored)


def stored_window(x: Tensor, earlier: int, store: Store | None, cache: MixerState | None) -> Tensor:
    """Return what is kept of inputs and of so many before them; a cache takes the last ones."""
    stored = x if store is None else store(x, 0 if cache is None else cache.length)
    if cache is None or cache.conv is None:
        stored = pad(stored, (0, 0, earlier, 0))
    else:
        stored = torch.cat([cache.conv, stored], 1)
    if cache is not None:
        cache.conv = stored[:, stored.shape[1] - earlier :]
    return stored


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, kept: Tensor | None = None
) -> Tensor:
    """Add shifted products, oldest token first; weight (channels, 1, width).

    `kept` is what is read of earlier tokens, and begins width - 1 of them before x.
    """
    earlier, tokens = weight.shape[-1] - 1, x.shape[1]
    kept = pad(x, (0, 0, earlier, 0)) if kept is None else kept
    read = [*(kept[:, k : k + tokens] for k in range(earlier)), x]
    y = read[0] * weight[:, 0, 0]
    for k in range(1, earlier + 1):
        y = y + read[k] * weight[:, 0, k]
    return y if bias is None else y + bias


class StepProjection(nn.Linear):
    """The dt_proj layer, whose bias is added in the scan, as kernels do."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class SiLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return silu(x)


class MambaMixer(nn.Module):
    """The mixer: in_proj, convolution, selection of dt, B and C, scan, gate, out_proj."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        inner, states, rank = config.d_inner, config.d_state, config.dt_rank
        self.split = (rank, states, states)
        self.in_proj = nn.Linear(config.d_model, 2 * inner, bias=config.bias)
        self.conv1d = CausalConv1d(inner, config.d_conv, config.conv_bias)
        self.act = SiLU()
        self.x_proj = nn.Linear(inner, sum(self.split), bias=False)
        self.dt_proj = StepProjection(rank, inner)
        # As with the embedding: no range is made on the meta device.
        decays = torch.arange(1.0, states + 1, device="cpu").log()
        self.A_log = nn.Parameter(torch.empty(inner, states).copy_(decays))
        self.D = nn.Parameter(torch.ones(inner))
        self.scan = Scan()
        self.hadamard: nn.Module = nn.Identity()
        self.out_proj = nn.Linear(inner, config.d_model, bias=config.bias)

    def forward(self, hidden: Tensor, cache: MixerState | None = None) -> Tensor:
        x, z = self.in_proj(hidden).chunk(2, -1)
        u = self.act(self.conv1d(x) if cache is None else self.conv1d(x, cache))
        dt, B, C = self.x_proj(u).split(self.split, -1)
        y, _ = self.scan(
            u=u,
            dt=self.dt_proj(dt),
            B=B,
            C=C,
            z=z,
            A_log=self.A_log,
            D=self.D,
            dt_bias=self.dt_proj.bias,
            **({} if cache is None else {"cache": cache}),
        )
        if cache is not None:
            cache.length += hidden.shape[1]
        return self.out_proj(self.hadamard(y))  # type: ignore[no-any-return]


class MambaBlock(nn.Module):
    """A norm, a mixer, and a residual stream in float32."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.d_model, config.eps)
        self.mixer: nn.Module = MambaMixer(config)

    def forward(self, hidden: Tensor, cache: MixerState | None = None) -> Tensor:
        normed = self.norm(hidden)
        mixed = self.mixer(normed) if cache is None else self.mixer(normed, cache)
        return hidden.float() + mixed  # type: ignore[no-any-return]


class MambaBackbone(nn.Module):
    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        # Normal numbers on the meta device load torch's decompositions, which takes two seconds.
        weight = torch.empty(config.vocab_size, config.d_model)
        weight = weight if weight.is_meta else nn.init.normal_(weight)
        self.embeddings = nn.Embedding(config.vocab_size, config.d_model, _weight=weight)
        self.layers = nn.ModuleList(MambaBlock(config) for _ in range(config.n_layer))
        self.norm_f = RMSNorm(config.d_model, config.eps)

    def forward(self, ids: Tensor, cache: Sequence[MixerState] | None = None) -> Tensor:
        hidden = self.embeddings(ids)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden) if cache is None else layer(hidden, cache[number])
        return self.norm_f(hidden)  # type: ignore[no-any-return]


class Mamba(nn.Module):
    """A language model: token ids (batch, tokens) to logits (batch, tokens, vocabulary).

    With a cache the ids are those of the tokens that follow the ones it has seen.
    """

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = MambaBackbone(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.backbone.embeddings.weight

    def new_cache(self) -> list[MixerState]:
        """Return the states before the first token, which `forward` reads and writes."""
        return [MixerState() for _ in self.backbone.layers]

    def forward(self, ids: Tensor, cache: Sequence[MixerState] | None = None) -> Tensor:
        if cache is None:
            return self.lm_head(self.backbone(ids))  # type: ignore[no-any-return]
        check_cache(cache, self.config.n_layer, len(ids))
        return self.lm_head(self.backbone(ids, cache))  # type: ignore[no-any-return]

    def mixers(self) -> list[MambaMixer]:
        return [layer.mixer for layer in self.backbone.layers]  # type: ignore[misc]
