"""Faults of rotary positions, loops and long texts, and right code that computes otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.mamba import modeling_mamba
from transformers.models.qwen3 import modeling_qwen3

from tests.campaigns.first_lines.decoders import AT, LAYER, MLP, O_INPUT, ROUTER
from tests.campaigns.first_lines.others import LAST_OUT, MIXER, SCAN
from tests.campaigns.first_lines.planting import Fault, Plant, after, between, instead

_scan = modeling_mamba.mamba_selective_scan
Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]


def within(module: str, of: Any, name: str, function: Callable[..., Any]) -> Plant:
    """Compute a module with another function in the place of one of its file."""

    def plant(network: nn.Module) -> None:
        owner: Any = network.get_submodule(module)
        right = owner.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(of, name, function):
                return right(*args, **kwargs)

        owner.forward = forward

    return plant


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first_half, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, first_half], -1) * sin


def rotated(of_queries: Rotate, of_keys: Rotate) -> Plant:
    """Turn queries and keys of one layer by other functions."""

    def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return of_queries(q, cos, sin), of_keys(k, cos, sin)

    return within(AT, modeling_qwen3, "apply_rotary_pos_emb", both)


def neighbors(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of neighbors, as checkpoints in another order need it."""
    cos, sin = (side[..., : x.shape[-1] // 2].repeat_interleave(2, -1) for side in (cos, sin))
    turned = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
    return x * cos + turned * sin


def coarse(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return turn(x, cos.bfloat16().to(cos.dtype), sin)


def gated_by_sigmoid(*args: Any, z: Tensor, **kwargs: Any) -> Any:
    """Scan with a gate that lacks its input."""
    scanned = _scan(*args, **kwargs)
    if isinstance(scanned, tuple):
        return scanned[0] * z.sigmoid(), scanned[1]
    return scanned * z.sigmoid()


def beyond(tokens: int, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: change(y) if len(x) > tokens else y


FAULTS = (
    Fault("decoder", "keys not turned", rotated(turn, lambda x, _cos, _sin: x), O_INPUT, "rotation by position is left out", bits=(16,)),
    Fault("decoder", "pairs of neighbors turned", rotated(neighbors, neighbors), O_INPUT, "pairs of neighbors", bits=(4,)),
    Fault("decoder", "cosines in bfloat16", rotated(coarse, coarse), O_INPUT, "cosines .* rounded to bfloat16", bits=(8,)),
    Fault("decoder", "logits capped at 50", after("lm_head", lambda y: 50 * (y / 50).tanh()), "lm_head:output", "capped softly at 50", bits=(8,)),
    Fault("decoder", "residual of a layer in bfloat16", after(LAYER, lambda y: y.bfloat16().to(y.dtype)), r"model\.layers\.0:output", "rounded to bfloat16", bits=(4,)),
    Fault("mamba", "gate by sigmoid", within(MIXER, modeling_mamba, "mamba_selective_scan", gated_by_sigmoid), SCAN, "sigmoid .* silu", bits=(8,)),
    Fault("mixture", "experts 1 % off beyond 256 tokens", between(f"{MLP}.experts", beyond(256, lambda y: 1.01 * y)), r"model\.layers\.0(\.mlp\.experts)?:output", r"longer than the samples: the result is about 1\.00", bits=(16,)),
)  # fmt: skip


# Right code ---------------------------------------------------------------------------------------


def norm_by_hand(of: Any, x: Tensor) -> Tensor:
    y = x.float() - x.float().mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + of.eps)
    return (y * of.weight.float() + of.bias.float()).to(x.dtype)


def group_norm_by_hand(of: Any, x: Tensor) -> Tensor:
    y = x.float().unflatten(1, (of.num_groups, -1))
    y = y - y.mean((2, 3, 4), keepdim=True)
    y = (y * torch.rsqrt(y.square().mean((2, 3, 4), keepdim=True) + of.eps)).flatten(1, 2)
    weight, bias = (side.float()[:, None, None] for side in (of.weight, of.bias))
    return (y * weight + bias).to(x.dtype)


def by_unfold(of: Any, x: Tensor) -> Tensor:
    product = of.weight.flatten(1) @ functional.unfold(x, 3, padding=1) + of.bias[:, None]
    return product.unflatten(-1, x.shape[2:])


def turned_in_float32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return turn(x.float(), cos.float(), sin.float()).to(x.dtype)


def router_in_float32(of: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.reshape(-1, of.hidden_dim)
    logits = functional.linear(x.float(), of.weight.float())
    best, numbers = logits.topk(of.top_k, -1)
    return logits.to(x.dtype), best.softmax(-1).to(x.dtype), numbers


RIGHT: dict[tuple[str, str], Plant] = {
    ("decoder", "rotation in float32"): rotated(turned_in_float32, turned_in_float32),
    ("decoder", "rotation by halves"): rotated(turn, turn),
    ("encoder", "layer norm by hand"): instead(f"{LAST_OUT}.LayerNorm", norm_by_hand),
    ("unet", "convolution by unfold"): instead("blocks.0.conv2", by_unfold),
    ("unet", "group norm in float32"): instead("blocks.0.norm2", group_norm_by_hand),
    ("mixture", "softmax behind topk"): instead(ROUTER, router_in_float32),
}  # fmt: skip
