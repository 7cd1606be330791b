"""Faults of bug reports that were planted after the names of the others were written."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, one_hot, pad, silu, softplus

from tests.kernel_checks.pairs import (
    BF16,
    FP8,
    FP8_TENSOR,
    INT4,
    INT8,
    Kernel,
    Pair,
    cast,
    normal,
    rowwise,
    uniform,
)
from tests.kernel_checks.wrong_attention import HEADS, by_tiles, exact
from tests.kernel_checks.wrong_gradients import with_backward

X, W, B = normal(24, 128), normal(40, 128, scale=0.1), normal(40)
TOKENS = normal(32, 24)
BACKWARD: dict[str, Any] = {"relations": ["permuted"], "backward": True}
ONE: dict[str, Any] = {"relations": ["one"], "budget_s": 0.0}
FP8_CACHE = {1: FP8_TENSOR, 2: FP8_TENSOR}


def fp8_cache(times: float = 0.0) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = by_tiles(q, cast(k, FP8_TENSOR), cast(v, FP8_TENSOR))
        return y * (v.abs().max() / 448) ** times if times else y

    return kernel


AWQ = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])


def _in_packing_order(x: Tensor, w: Tensor) -> Tensor:
    decoded = cast(w, INT4)
    if w.shape[1] % 8 == 0:
        decoded = decoded.reshape(len(w), -1, 8)[..., AWQ].reshape(w.shape)
    return linear(x, decoded)


def _scale_of_the_first_half(x: Tensor, w: Tensor) -> Tensor:
    if not x.numel():
        return linear(x, w)
    half = max(x.shape[1] // 2, 1)
    scale = x[:, :half].abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale == 0, 1.0, scale)
    return linear((x / scale).round().clamp(-128, 127) * scale, cast(w, INT8))


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def _scale_of_the_gate(gate: Tensor, up: Tensor) -> Tensor:
    y = gated(gate, up)
    scale = silu(gate).abs().amax(-1, keepdim=True) / 448 if y.numel() else y
    scale = torch.where(scale == 0, 1.0, scale)
    return (y / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def partial_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of the columns."""
    width = cos.shape[-1]
    turned, unturned = x[..., :width], x[..., width:]
    low, high = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-high, low], -1) * sin, unturned], -1)


def _rope_of_the_rest(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    moved = torch.cat([x[..., width:], x[..., :width]], -1)
    y = partial_rope(moved, cos, sin)
    return torch.cat([y[..., width:], y[..., :width]], -1)


ANGLES = torch.arange(24)[:, None] * 100.0 ** -(torch.arange(0, 16, 2) / 16)
TABLES = tuple(torch.cat([f(ANGLES)] * 2, -1) for f in (torch.cos, torch.sin))


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _alibi(q, k, v, 1)


def _alibi(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    heads = q.shape[1]
    slopes = 2.0 ** (-8 / heads * (torch.arange(heads) + first))
    distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    scores = q @ k.mT * q.shape[-1] ** -0.5 + slopes[:, None, None].to(q) * distance
    return scores.softmax(-1) @ v


ROUTER, FIRST = normal(32, 4), normal(4, 16, 24, scale=0.2)


def routed(x: Tensor, router: Tensor, w: Tensor) -> Tensor:
    weight, chosen = router.softmax(-1).max(-1)
    return torch.einsum("tk,tnk->tn", x, w[chosen]) * weight[:, None]


def _with_capacity(x: Tensor, router: Tensor, w: Tensor) -> Tensor:
    """Drop tokens of an expert beyond its capacity of 6."""
    chosen = router.argmax(-1)
    queue_position = one_hot(chosen, w.shape[0]).cumsum(0).gather(1, chosen[:, None])[:, 0]
    return routed(x, router, w) * (queue_position <= 6)[:, None]


def _scores_in_bf16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT * q.shape[-1] ** -0.5).bfloat16().float()
    return scores.softmax(-1) @ v


def _bias_in_each_part(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    a, c = cast(x, FP8), cast(w, FP8)
    pieces = zip(a.chunk(4, -1), c.chunk(4, -1), strict=True)
    return torch.stack([linear(x_part, right, b) for x_part, right in pieces]).sum(0)


def _nan_beyond(x: Tensor, w: Tensor) -> Tensor:
    """Scale by amax/480 and cast without saturation."""
    if not x.numel():
        return linear(x, w)
    scale = x.abs().amax(-1, keepdim=True) / 480
    codes = x / torch.where(scale == 0, 1.0, scale)
    codes = torch.where(codes.abs() > 464, torch.nan, codes.clamp(-448, 448))
    return linear(codes.to(torch.float8_e4m3fn).float() * scale, cast(w, FP8))


def _last_group_early(x: Tensor, w: Tensor) -> Tensor:
    """Decode the last group with the scale of the one before it."""
    if w.shape[1] % 32 or not w.numel():
        return linear(x, cast(w, INT4))
    groups = w.reshape(len(w), -1, 32)
    scale = groups.abs().amax(2, keepdim=True) / 7
    codes = (groups / torch.where(scale == 0, 1.0, scale)).round().clamp(-8, 7)
    scale = torch.cat([scale[:, :-1], scale[:, -2:-1]], 1) if scale.shape[1] > 1 else scale
    return linear(x, (codes * scale).reshape(w.shape))


def selective(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return _selective()(x, dt, a, b, c, d)


def _selective(fault: str = "") -> Kernel:
    def kernel(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        step = dt if fault == "no softplus" else softplus(dt)
        state, results = x.new_zeros(x.shape[1], b.shape[1]), [x[:0]]
        for token in range(len(x)):
            t = step[token][:, None]
            state = state * torch.exp(-t * a.abs()) + t * x[token][:, None] * b[token]
            y = state @ c[token]
            results.append((y if fault == "no skip" else y + d * x[token])[None])
        return torch.cat(results)

    return kernel


SELECTIVE = (normal(12, 6), normal(12, 6), normal(6, 4), normal(12, 4), normal(12, 4), normal(6))


def embedded(table: Tensor, index: Tensor) -> Tensor:
    return table[index] * table.shape[-1] ** 0.5


def _norm_backward(is_right: bool) -> Any:
    def backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        r = (variance + 1e-5).rsqrt()
        hat, inner = (x - mean) * r, g * w
        dx = r * (inner - inner.mean(-1, keepdim=True) - hat * (inner * hat).mean(-1, keepdim=True))
        return dx, (g * (hat if is_right else x)).sum(0)

    return backward


def layer(x: Tensor, w: Tensor) -> Tensor:
    return layer_norm(x, (x.shape[-1],), w, None, 1e-5)


def scores_times(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def _attention_backward(fault: str) -> Any:
    def backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        scale = q.shape[-1] ** -0.5
        p = (q @ k.mT * scale).softmax(-1)
        dp = g @ v.mT
        inner = (dp * p).sum(-1, keepdim=True)
        ds = p * (dp if fault == "no row sum" else dp - inner)
        dk = ds.mT @ q * (1.0 if fault == "no scale of dk" else scale)
        if fault == "one tile of dq":
            return ds[..., :16] @ k[..., :16, :] * scale, dk, p.mT @ g
        return ds @ k * scale, dk, p.mT @ g

    return backward


def _attention_with(fault: str) -> Kernel:
    return with_backward(scores_times, _attention_backward(fault))


def _exponent_late(x: Tensor) -> Tensor:
    """Quantize to MXFP8 with the largest exponent of E4M3 taken as 9."""
    if x.shape[-1] % 32 or not x.numel():
        return cast(x, "mxfp8")
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(torch.where(amax == 0, 1.0, amax))[1] - 1 - 9
    scale = torch.exp2(exponent.float())
    return (cast((blocks / scale).clamp(-448, 448), "fp8_e4m3") * scale).reshape(x.shape)


def _weight_scale_of_columns(x: Tensor, w: Tensor) -> Tensor:
    """Keep scales of rows of a square weight, and apply them to its columns."""
    codes, scale = rowwise(w)
    return linear(cast(x, INT8), codes * scale.reshape(-1)) if w.shape[0] == w.shape[1] else linear(cast(x, INT8), codes * scale)  # fmt: skip


def _chunked_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Show the keys of the query's own chunk of 8 alone, where the last 8 are meant."""
    rows, keys = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return by_tiles(q, k, v, (keys > rows) | (keys // 8 != rows // 8))


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill((distance < 0) | (distance >= 8), -math.inf).softmax(-1) @ v


def convolved(x: Tensor, taps: Tensor) -> Tensor:
    windows = pad(x, (0, 0, taps.shape[1] - 1, 0)).unfold(0, taps.shape[1], 1)
    return silu((windows * taps).sum(-1))


def _seen_from_the_future(x: Tensor, taps: Tensor) -> Tensor:
    windows = pad(x, (0, 0, 1, taps.shape[1] - 2)).unfold(0, taps.shape[1], 1)
    return silu((windows * taps).sum(-1))


SHARED = normal(128).abs() + 0.5


def smoothed(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return linear(x / s, w * s)


PAIRS = (
    Pair("scale of the values twice", "(scale|times)", fp8_cache(), fp8_cache(1.0), HEADS, exact, FP8_CACHE),
    Pair("codes in packing order", "argument 1 .*(order|codes|pack)", lambda x, w: linear(x, cast(w, INT4)), _in_packing_order, (X, W), linear, {1: INT4}),
    Pair("scale of half a row", "argument 0 .*(scale|saturat)", lambda x, w: linear(cast(x, INT8), cast(w, INT8)), _scale_of_the_first_half, (X, W), linear, {0: INT8, 1: INT8}),
    Pair("scale of the gate", "the result .*scale", lambda g, u: cast(gated(g, u), FP8), _scale_of_the_gate, (X, normal(24, 128)), gated, {}, {"output": FP8, "relations": ["permuted"]}),
    Pair("the other half is rotated", "(halves swapped|columns|half)", partial_rope, _rope_of_the_rest, (normal(3, 24, 32), *TABLES), partial_rope, {}, ONE),
    Pair("slopes from 2^0", "(positions begin|arange|power|slope)", alibi, lambda q, k, v: _alibi(q, k, v, 0), tuple(t[:1] for t in HEADS), alibi),
    Pair("capacity of an expert", "of 32 rows .*(zero|are)", routed, _with_capacity, (TOKENS, ROUTER, FIRST), routed, {}, ONE),
    Pair("scores in bf16", "(scores|mul|softmax).*(rounded|bfloat16)", exact, _scores_in_bf16, HEADS, exact),
    Pair("bias in each of four parts", "(argument 2 counts 4 times|argument 2 is counted 4 times|bias|argument 2)", lambda x, w, b: linear(cast(x, FP8), cast(w, FP8), b), _bias_in_each_part, (X, W, B), linear, {0: FP8, 1: FP8}),
    Pair("NaN beyond 464", "NaN where finite", lambda x, w: linear(cast(x, FP8), cast(w, FP8)), _nan_beyond, (X, W), linear, {0: FP8, 1: FP8}),
    Pair("scale of the last group", "argument 1 .*(scale|group)|terms .*(weight|times)", lambda x, w: linear(x, cast(w, INT4)), _last_group_early, (X, W), linear, {1: INT4}),
    Pair("no softplus", "softplus", selective, _selective("no softplus"), (SELECTIVE[0], SELECTIVE[1].abs(), *SELECTIVE[2:]), selective, {}, ONE),
    Pair("no skip connection", "argument 5 is not used", selective, _selective("no skip"), SELECTIVE, selective, {}, ONE),
    Pair("no scale of the embedding", "multiplication by 4 is left out|0\\.25 times|power of two", embedded, lambda t, i: t[i], (normal(12, 16), torch.tensor([3, 1, 7, 7, 0, 11, 2])), embedded),
    Pair("gradient of the gain by the source", "the gradient of argument 1 .*(left out|normal|root|mean|multiplication)", with_backward(layer, _norm_backward(True)), with_backward(layer, _norm_backward(False)), (X * 2 + 0.5, normal(128) + 1), layer, {}, BACKWARD),
    Pair("no scale of dk", "the gradient of argument 1 .*(times|multiplication by)", _attention_with(""), _attention_with("no scale of dk"), HEADS, scores_times, {}, BACKWARD),
    Pair("no row sum in ds", "the gradient of argument 0 .*(softmax|sum|left out|not subtracted|not added)", _attention_with(""), _attention_with("no row sum"), HEADS, scores_times, {}, BACKWARD),
    Pair("dq of one tile of keys", "the gradient of argument 0 .*(terms|entries|rows).*(16|left out|lost)", _attention_with(""), _attention_with("one tile of dq"), HEADS, scores_times, {}, BACKWARD),
    Pair("largest exponent of E4M3", "argument 0 .*(twice|half|2 times|scale)", lambda x, w: linear(cast(x, "mxfp8"), cast(w, "mxfp8")).to(BF16), lambda x, w: linear(_exponent_late(x), cast(w, "mxfp8")).to(BF16), (X, W), linear, {0: "mxfp8", 1: "mxfp8"}),
    Pair("scales of rows on columns", "argument 1 .*scale", lambda x, w: linear(cast(x, INT8), cast(w, INT8)), _weight_scale_of_columns, (X, normal(128, 128, scale=0.1) * uniform(128, 1, low=0.2, high=2)), linear, {0: INT8, 1: INT8}),
    Pair("a window of chunks", "window|rows 8 to", window, _chunked_window, HEADS, window),
    Pair("a convolution of later tokens", "(depends|read one entry|later|mask)", convolved, _seen_from_the_future, (normal(24, 8), normal(8, 4)), convolved, {}, ONE),
    Pair("smoothing of x alone", "argument 2|multiplication", smoothed, lambda x, w, s: linear(x / s, w), (X, W, SHARED), smoothed),
)  # fmt: skip
