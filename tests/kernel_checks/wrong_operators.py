"""Norms, activations and rotary embeddings that are wrong in one operator or one order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import layer_norm, linear, silu

from tests.kernel_checks.pairs import BF16, FP16, INT8, Kernel, Pair, cast, normal

X, GAIN, BIAS = normal(24, 96), normal(96) + 1, normal(96)
SMALL = normal(24, 96, scale=0.03)
HALF = normal(32, 128, dtype=BF16), (normal(128) + 1).to(BF16)
EPS = 1e-5


def rounded(function: Kernel, dtype: torch.dtype) -> Kernel:
    """Compute in float32 and round the result."""

    def kernel(*arguments: Any) -> Tensor:
        wide = [a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments]  # fmt: skip
        return function(*wide).to(dtype)

    return kernel


def in_bf16(function: Kernel) -> Kernel:
    return rounded(function, BF16)


# Norms ----------------------------------------------------------------------------------------


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return layer_norm(x, (x.shape[-1],), w, b, EPS)


def layer_by_hand(
    x: Tensor,
    w: Tensor,
    b: Tensor,
    less: int = 0,
    bias_first: bool = False,
    eps_outside: bool = False,
    keeps_mean: bool = False,
) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    centered = x - mean
    squares = (x if keeps_mean else centered).square().sum(-1, keepdim=True)
    variance = squares / max(x.shape[-1] - less, 1)
    root = variance.sqrt() + EPS if eps_outside else (variance + EPS).sqrt()
    y = centered / root
    return (y + b) * w if bias_first else y * w + b


def rms(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def _rms_outside(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-2) * w


def rms_large_eps(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2) * w


def _rms_of(width: int) -> Kernel:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) / width + 1e-6) * w

    return kernel


def _rms_of_sums(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() * w


def _no_root(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6) * w


def added_norm(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
    return rms(x + r, w)


def with_residual(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return linear(x, w) + r


def groups_of(count: int, correction: int = 0) -> Kernel:
    def norm(x: Tensor) -> Tensor:
        parts = x.reshape(len(x), count, -1)
        centered = parts - parts.mean(-1, keepdim=True)
        variance = centered.square().sum(-1, keepdim=True) / (parts.shape[-1] - correction)
        return (centered * (variance + EPS).rsqrt()).reshape(x.shape)

    return norm


def group_norm(x: Tensor) -> Tensor:
    return functional.group_norm(x, 4, eps=EPS)


# Activations ----------------------------------------------------------------------------------


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def fused_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


def _interleaved_swiglu(x: Tensor) -> Tensor:
    return silu(x[..., ::2]) * x[..., 1::2]


def _up_first(x: Tensor) -> Tensor:
    up, gate = x.chunk(2, -1)
    return silu(gate) * up


def gpt_oss(gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 3.0, one: float = 1.0) -> Tensor:  # fmt: skip
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + one)


def gelu_erf(x: Tensor) -> Tensor:
    return functional.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def tanh_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def erf_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate) * up


def activated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.gelu(linear(x, w, b))


def softcapped(x: Tensor, w: Tensor) -> Tensor:
    return 30 * torch.tanh(linear(x, w) / 30)


# Rotary embedding -----------------------------------------------------------------------------


def angles(length: int, width: int, base: float = 10000.0) -> Tensor:
    frequencies = base ** -(torch.arange(0, width, 2) / width)
    return torch.arange(length)[:, None] * frequencies


def rotate_half(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([-high, low], -1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def rope_by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    c, s = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
    return torch.cat([low * c - high * s, high * c + low * s], -1)


def _interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    c, s = cos[..., :half], sin[..., :half]
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)


def _halves_swapped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    c, s = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
    return torch.cat([high * c - low * s, low * c + high * s], -1)


def _turned_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rope_by_halves(x, cos, -sin)


def _late(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rope_by_halves(x, cos.roll(-1, 0), sin.roll(-1, 0))


def rope_at(x: Tensor, positions: Tensor) -> Tensor:
    turned = positions[:, None] * (10000.0 ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1]))
    turned = torch.cat([turned, turned], -1)
    return x * turned.cos() + rotate_half(x) * turned.sin()


def rope_inside(x: Tensor, first: int = 0) -> Tensor:
    turned = (angles(x.shape[-2] + first, x.shape[-1])[first:]).to(x.dtype)
    turned = torch.cat([turned, turned], -1)
    return x * turned.cos() + rotate_half(x) * turned.sin()


def _positions_of_a_tile(x: Tensor) -> Tensor:
    """Begin with position 0 again after 128 tokens."""
    turned = angles(128, x.shape[-1])[torch.arange(x.shape[-2]) % 128]
    turned = torch.cat([turned, turned], -1)
    return x * turned.cos() + rotate_half(x) * turned.sin()


HEADS = normal(3, 24, 32)
TABLES = tuple(torch.cat([f(angles(24, 32))] * 2, -1) for f in (torch.cos, torch.sin))
POSITIONS = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:24]
NORM3 = (X, GAIN, BIAS)
ONE: dict[str, Any] = {"relations": ["one"]}
"""Columns of the tables have a partner, so they are not reordered."""
GATE, UP = normal(24, 64, scale=2.0), normal(24, 64, scale=2.0)


def _wrong_layer(**fault: bool | int) -> Callable[..., Tensor]:
    return lambda x, w, b: layer_by_hand(x, w, b, **fault)  # type: ignore[arg-type]


PAIRS = (
    Pair("variance over n - 1", "divided by 95, not by 96",
         layer_by_hand, _wrong_layer(less=1), NORM3, layer),
    Pair("variance over n - 1 in bf16", "divided by 95, not by 96",
         in_bf16(layer_by_hand), in_bf16(_wrong_layer(less=1)), tuple(t.to(BF16) for t in NORM3), layer),
    Pair("group norm over n - 1", "divided by 23, not by 24",
         groups_of(4), groups_of(4, 1), (X,), group_norm),
    Pair("groups of another size", "groups",
         groups_of(4), groups_of(8), (X,), group_norm),
    Pair("bias before gain", "before .*(gain|multipl|scaled)|(gain|multipl|scaled).*before",
         layer_by_hand, _wrong_layer(bias_first=True), NORM3, layer),
    Pair("bias before gain in fp16", "before .*(gain|multipl|scaled)|(gain|multipl|scaled).*before",
         rounded(layer_by_hand, FP16), rounded(_wrong_layer(bias_first=True), FP16), tuple(t.half() for t in NORM3), layer),
    Pair("eps outside the root", "eps .*(outside|after|behind)",
         layer_by_hand, _wrong_layer(eps_outside=True), (SMALL * 0.1, GAIN, BIAS), layer),
    Pair("eps of RMS outside the root", "eps .*(outside|after|behind)|0.01 .*(outside|after) ",
         lambda x, w: rms_large_eps(x, w), _rms_outside, (X, GAIN), rms_large_eps),
    Pair("mean kept in the variance", "mean",
         layer_by_hand, _wrong_layer(keeps_mean=True), (X + 0.5, GAIN, BIAS), layer),
    Pair("width of the padded row", "sum over 96 is divided by 128, not by 96",
         rms, _rms_of(128), (X, GAIN), rms),
    Pair("sum for mean", "sum over 96 is (not divided|divided by 1)|sqrt\\(96\\)|not divided",
         rms, _rms_of_sums, (X, GAIN), rms),
    Pair("no root", "(rsqrt|root)", rms, _no_root, (X * 3, GAIN), rms),
    Pair("residual dropped before a norm", "argument 1 is not used: read as zeros",
         in_bf16(added_norm), in_bf16(lambda x, _r, w: rms(x, w)), (HALF[0], normal(32, 128, dtype=BF16), HALF[1]), added_norm),
    Pair("residual dropped after a product", "argument 2 is not used: read as zeros",
         lambda x, w, r: linear(cast(x, INT8), cast(w, INT8)) + r, lambda x, w, _r: linear(cast(x, INT8), cast(w, INT8)),
         (X, normal(40, 96), normal(24, 40)), with_residual, {0: INT8, 1: INT8}),
    Pair("residual of the norm's result", "argument 1 ",
         added_norm, lambda x, r, w: rms(x, w) + r, (X, normal(24, 96), GAIN), added_norm),
    Pair("tanh for erf", "gelu by tanh is computed in the place of gelu",
         erf_by_hand, tanh_by_hand, (GATE,), gelu_erf),
    Pair("erf for tanh", "gelu is computed in the place of gelu by tanh",
         tanh_by_hand, erf_by_hand, (GATE,), gelu_tanh),
    Pair("tanh for erf in GEGLU, fp16", "gelu by tanh is computed in the place of gelu",
         rounded(lambda g, u: erf_by_hand(g) * u, FP16), rounded(lambda g, u: tanh_by_hand(g) * u, FP16), (GATE.half(), UP.half()), geglu),
    Pair("SiLU for GELU", "silu is computed in the place of gelu",
         in_bf16(lambda g, u: erf_by_hand(g) * u), in_bf16(lambda g, u: silu(g) * u), (GATE.to(BF16), UP.to(BF16)), geglu),
    Pair("gate and up swapped", "arguments 0 and 1 are swapped",
         in_bf16(swiglu), in_bf16(lambda g, u: swiglu(u, g)), (GATE.to(BF16), UP.to(BF16)), swiglu),
    Pair("up before gate", "halves swapped", fused_swiglu, _up_first, (GATE,), fused_swiglu),
    Pair("interleaved gate and up", "interleaved", fused_swiglu, _interleaved_swiglu, (GATE,), fused_swiglu),
    Pair("no clamp", "clamp", gpt_oss, lambda g, u: gpt_oss(g, u, limit=99.0), (GATE, UP), gpt_oss),
    Pair("clamp of the gate below, too", "clamp",
         gpt_oss, lambda g, u: gpt_oss(g.clamp(min=-3.0), u), (GATE, UP), gpt_oss),
    Pair("no one beside up", "1 .*(not added|left out)|without the one|is 0, not 1",
         gpt_oss, lambda g, u: gpt_oss(g, u, one=0.0), (GATE, UP), gpt_oss),
    Pair("no alpha", "1.702", in_bf16(gpt_oss), in_bf16(lambda g, u: gpt_oss(g, u, alpha=1.0)), (GATE.to(BF16), UP.to(BF16)), gpt_oss),
    Pair("bias after the activation", "argument 2 .*(after|before) |after gelu",
         lambda x, w, b: erf_by_hand(linear(x, w) + b), lambda x, w, b: erf_by_hand(linear(x, w)) + b,
         (X, normal(40, 96, scale=0.2), normal(40)), activated),
    Pair("no activation", "the identity is computed in the place of gelu|gelu is left out",
         lambda x, w, b: erf_by_hand(linear(x, w) + b), lambda x, w, b: linear(x, w) + b,
         (X, normal(40, 96, scale=0.2), normal(40)), activated),
    Pair("no soft cap", "tanh is left out", softcapped, lambda x, w: linear(x, w), (X * 2, normal(40, 96)), softcapped),
    Pair("RoPE interleaved", "interleaved", rope_by_halves, _interleaved, (HEADS, *TABLES), rope, {}, ONE),
    Pair("RoPE interleaved in bf16", "interleaved", in_bf16(rope_by_halves), in_bf16(_interleaved),
         tuple(t.to(BF16) for t in (HEADS, *TABLES)), rope, {}, ONE),
    Pair("RoPE with halves swapped", "halves swapped", rope_by_halves, _halves_swapped, (HEADS, *TABLES), rope, {}, ONE),
    Pair("RoPE backward", "argument 2 (counts -1 times|has the opposite sign)|opposite (direction|sign)|is subtracted, not added",
         in_bf16(rope_by_halves), in_bf16(_turned_back), tuple(t.to(BF16) for t in (HEADS, *TABLES)), rope, {}, ONE),
    Pair("tables late by one", "arguments 1, 2 (is|are) read one entry too far", rope_by_halves, _late, (HEADS, *TABLES), rope, {}, ONE),
    Pair("position late by one", "argument 1 is taken one too high",
         rope_at, lambda x, p: rope_at(x, p + 1), (HEADS, POSITIONS), rope_at),
    Pair("positions from one", "positions|arange",
         rope_inside, lambda x: rope_inside(x, 1), (HEADS,), rope_inside),
    Pair("positions of a tile", "rows 128 to 256 of 257|positions begin anew after 128", rope_inside, _positions_of_a_tile, (HEADS,), rope_inside, {},
         {"relations": ["long"]}),
)  # fmt: skip
