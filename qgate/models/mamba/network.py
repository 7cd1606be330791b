"""A Mamba-1 language model in plain PyTorch, with the leaf names of Hugging Face's.

Every place where a tensor flows is a module, the scan and the (usually empty) Hadamard transform
included: hooks see all of it, and a part can be replaced from outside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu

from qgate.models.mamba.scanning import Scan


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
    """A depthwise convolution over tokens that looks back only; (batch, tokens, channels)."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__(channels, channels, width, groups=channels, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return causal_conv(x, self.weight, self.bias)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Add shifted products, oldest token first; weight (channels, 1, width)."""
    width, tokens = weight.shape[-1], x.shape[1]
    x = pad(x, (0, 0, width - 1, 0))
    y = x[:, :tokens] * weight[:, 0, 0]
    for k in range(1, width):
        y = y + x[:, k : k + tokens] * weight[:, 0, k]
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

    def forward(self, hidden: Tensor) -> Tensor:
        x, z = self.in_proj(hidden).chunk(2, -1)
        u = self.act(self.conv1d(x))
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
        )
        return self.out_proj(self.hadamard(y))  # type: ignore[no-any-return]


class MambaBlock(nn.Module):
    """A norm, a mixer, and a residual stream in float32."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.d_model, config.eps)
        self.mixer: nn.Module = MambaMixer(config)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.float() + self.mixer(self.norm(hidden))  # type: ignore[no-any-return]


class MambaBackbone(nn.Module):
    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        # Normal numbers on the meta device load torch's decompositions, which takes two seconds.
        weight = torch.empty(config.vocab_size, config.d_model)
        weight = weight if weight.is_meta else nn.init.normal_(weight)
        self.embeddings = nn.Embedding(config.vocab_size, config.d_model, _weight=weight)
        self.layers = nn.ModuleList(MambaBlock(config) for _ in range(config.n_layer))
        self.norm_f = RMSNorm(config.d_model, config.eps)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embeddings(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm_f(hidden)  # type: ignore[no-any-return]


class Mamba(nn.Module):
    """A language model: token ids (batch, tokens) to logits (batch, tokens, vocabulary)."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = MambaBackbone(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.backbone.embeddings.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.backbone(ids))  # type: ignore[no-any-return]

    def mixers(self) -> list[MambaMixer]:
        return [layer.mixer for layer in self.backbone.layers]  # type: ignore[misc]
