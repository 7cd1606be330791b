"""Attention that is wrong in its scores, its masks, its heads, or its softmax by tiles."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from tests.kernel_checks.pairs import BF16, FP8_TENSOR, FP16, Kernel, Pair, cast, normal
from tests.kernel_checks.wrong_operators import in_bf16, rounded

HEADS = tuple(normal(2, 3, 40, 24) for _ in range(3))
HALF_HEADS = tuple(t.to(BF16) for t in HEADS)
GROUPED = normal(2, 6, 20, 16), normal(2, 3, 20, 16), normal(2, 3, 20, 16)
SHORT_QUERY = normal(2, 3, 12, 24), normal(2, 3, 40, 24), normal(2, 3, 40, 24)
PADDED = torch.arange(40) < 33
TILE = 16


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v)


def by_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None = None,
    *,
    scale: float | None = None,
    rescales: bool = True,
    divides: bool = True,
    whole: bool = False,
    sums: bool = True,
) -> Tensor:
    """Attend tile by tile with an online softmax, right or with one fault."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    keys = k.shape[-2] // TILE * TILE if whole and k.shape[-2] >= TILE else k.shape[-2]
    top = torch.full_like(scores[..., :1], -1e30)
    total, result = torch.zeros_like(top), torch.zeros(*scores.shape[:-1], v.shape[-1])
    for start in range(0, keys, TILE):
        part = scores[..., start : min(start + TILE, keys)]
        larger = torch.maximum(top, part.amax(-1, keepdim=True))
        shrink, p = (top - larger).exp(), (part - larger).exp()
        total = total * (shrink if sums else 1.0) + p.sum(-1, keepdim=True)
        result = result * (shrink if rescales else 1.0)
        result = result + p @ v[..., start : min(start + TILE, keys), :]
        top = larger
    return result / total if divides else result


def _later(q: Tensor, k: Tensor, diagonal: int = 0) -> Tensor:
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1 + diagonal)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def _causal(diagonal: int) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = by_tiles(q, k, v, _later(q, k, diagonal))
        return y.nan_to_num(0.0) if diagonal < 0 else y

    return kernel


def aligned_at_the_end(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = _later(q, k, k.shape[-2] - q.shape[-2])
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -math.inf).softmax(-1) @ v


def windowed(q: Tensor, k: Tensor, v: Tensor, width: int = 8) -> Tensor:
    distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    hidden = (distance < 0) | (distance >= width)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -math.inf).softmax(-1) @ v


def _window(width: int) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
        return by_tiles(q, k, v, (distance < 0) | (distance >= width))

    return kernel


def masked(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, visible)


def up_to(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    hidden = torch.arange(k.shape[-2]) >= length
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -math.inf).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    count = q.shape[1] // k.shape[1]
    return exact(q, k.repeat_interleave(count, 1), v.repeat_interleave(count, 1))


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    count = q.shape[1] // k.shape[1]
    return by_tiles(q, k.repeat(1, count, 1, 1), v.repeat(1, count, 1, 1))


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    count = q.shape[1] // k.shape[1]
    return by_tiles(q, k.repeat_interleave(count, 1), v.repeat_interleave(count, 1))


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    more = sinks.reshape(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, more], -1).softmax(-1)[..., :-1] @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 5 * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / 5)
    return scores.softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    scores = q @ k.mT * q.shape[-1] ** -0.5 + slopes[:, None, None] * distance
    return scores.softmax(-1) @ v


def _fp8_heads(change: Kernel) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return change(q.float(), cast(k, FP8_TENSOR), cast(v, FP8_TENSOR)).to(BF16)

    return kernel


def _value_scale_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return by_tiles(q.float(), cast(k, FP8_TENSOR), cast(v, FP8_TENSOR) * (k.abs().max() / v.abs().max())).to(BF16)  # fmt: skip


def _without_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT * q.shape[-1] ** -0.5).exp()
    return p @ v / p.sum(-1, keepdim=True)


def _last_query_tile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = by_tiles(q, k, v)
    y[..., 128:, :] = 0
    return y


def _keys_of_one_tile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return by_tiles(q, k[..., :256, :], v[..., :256, :])


def _heads_beyond(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = by_tiles(q, k, v)
    y[:, 64:] = 0
    return y


def _padded_width(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    more = -q.shape[-1] % 32
    q, k = pad(q, (0, more)), pad(k, (0, more))
    return by_tiles(q, k, v, scale=q.shape[-1] ** -0.5)


def _fault(**changes: Any) -> Kernel:
    return lambda q, k, v: by_tiles(q, k, v, **changes)


FP8_CACHE = {1: FP8_TENSOR, 2: FP8_TENSOR}
NO_MASK = torch.ones(40, 40, dtype=torch.bool).tril(3)
PAIRS = (
    Pair("scale of the padded head", "scores of the softmax are .*0\\.86.*|sqrt\\(24/32\\)",
         by_tiles, _padded_width, HEADS, exact),
    Pair("scale of the padded head in bf16", "scores of the softmax are .*0\\.8[67].*|sqrt\\(24/32\\)",
         in_bf16(by_tiles), in_bf16(_padded_width), HALF_HEADS, exact),
    Pair("no scale of the scores", "scores of the softmax are .*(4\\.9|sqrt\\(24\\))|multiplication by 0.204124 is left out",
         by_tiles, _fault(scale=1.0), tuple(t * 0.5 for t in HEADS), exact),
    Pair("online softmax without rescaling", "rescal", by_tiles, _fault(rescales=False), HEADS, exact),
    Pair("online softmax without rescaling in bf16", "rescal",
         in_bf16(by_tiles), in_bf16(_fault(rescales=False)), HALF_HEADS, exact),
    Pair("sum of the softmax without rescaling", "rescal", by_tiles, _fault(sums=False), HEADS, exact),
    Pair("not divided by the sum", "not (divided|normalized)", by_tiles, _fault(divides=False), HEADS, exact),
    Pair("last partial tile of keys", "8 entries.*32 to 39.*left out of the softmax|entries 32 to 39",
         by_tiles, _fault(whole=True), HEADS, exact),
    Pair("last partial tile of keys in bf16", "8 entries.*32 to 39.*left out of the softmax|entries 32 to 39",
         in_bf16(by_tiles), in_bf16(_fault(whole=True)), HALF_HEADS, exact),
    Pair("causal mask late", "the mask shows one key more", _causal(0), _causal(1), HEADS, causal),
    Pair("causal mask early in fp16", "the mask shows one key less",
         rounded(_causal(0), FP16), rounded(_causal(-1), FP16), tuple(t.half() for t in HEADS), causal),
    Pair("mask aligned at the beginning", "aligned",
         lambda q, k, v: by_tiles(q, k, v, _later(q, k, k.shape[-2] - q.shape[-2])), _causal(0), SHORT_QUERY, aligned_at_the_end),
    Pair("window one key wider", "window shows one earlier key more", _window(8), _window(9), HEADS, windowed),
    Pair("window one key narrower in bf16", "window shows one earlier key less", in_bf16(_window(8)), in_bf16(_window(7)), HALF_HEADS, windowed),
    Pair("no window", "window|mask is not applied", _window(8), _window(99), HEADS, windowed),
    Pair("mask of padding missing", "argument 3 is not used: read as True everywhere|mask is not applied",
         lambda q, k, v, m: by_tiles(q, k, v, ~m), lambda q, k, v, _m: by_tiles(q, k, v), (*HEADS, PADDED), masked),
    Pair("mask turned around", "argument 3 is taken as its opposite|hides what it should show",
         lambda q, k, v, m: by_tiles(q, k, v, ~m), lambda q, k, v, m: by_tiles(q, k, v, m), (*HEADS, NO_MASK[:, :40].roll(2, 0)), masked),
    Pair("one key of padding", "argument 3 is taken as 34, not 33",
         lambda q, k, v, n: by_tiles(q, k, v, torch.arange(k.shape[-2]) >= n), lambda q, k, v, n: by_tiles(q, k, v, torch.arange(k.shape[-2]) > n), (*HEADS, 33), up_to),
    Pair("heads repeated, not interleaved", "head|repeat|interleav", _grouped, _repeated, GROUPED, grouped),
    Pair("heads repeated, not interleaved, in bf16", "head|repeat|interleav", in_bf16(_grouped), in_bf16(_repeated), tuple(t.to(BF16) for t in GROUPED), grouped),
    Pair("sinks not used", "argument 3 is not used|entry 40 of 41 .the last one. is left out of the softmax", with_sinks, lambda q, k, v, _s: by_tiles(q, k, v), (*HEADS, normal(3) + 1), with_sinks),
    Pair("no soft cap of scores", "tanh is left out",
         capped, lambda q, k, v: by_tiles(q, k, v), tuple(t * 2 for t in HEADS), capped),
    Pair("slopes of the next head", "argument 3 is read one entry too far",
         biased, lambda q, k, v, s: biased(q, k, v, s.roll(-1)), (*HEADS, torch.tensor([0.5, 0.25, 0.125])), biased),
    Pair("scale of keys for values", "(scale|scales) of argument",
         _fp8_heads(by_tiles), _value_scale_of_keys, (HALF_HEADS[0], HALF_HEADS[1], HALF_HEADS[2] * 3), exact, FP8_CACHE),
    Pair("keys and values swapped", "arguments 1 and 2 are swapped",
         by_tiles, lambda q, k, v: by_tiles(q, v, k), HEADS, exact),
    Pair("no maximum is subtracted", "NaN where finite",
         by_tiles, _without_maximum, HEADS, exact, {}, {"relations": ["large", "dominant"]}),
    Pair("queries beyond 128", "rows 128 to 256 of 257 \\(to the end\\) are zero",
         by_tiles, _last_query_tile, HEADS, exact, {}, {"relations": ["long"]}),
    Pair("keys beyond 256", "entry 256 of 257 .*(the last one).* left out",
         by_tiles, _keys_of_one_tile, HEADS, exact, {}, {"relations": ["long"]}),
    Pair("heads beyond 64", "indices 64 to 256 of 257 in dimension 1 \\(to the end\\) are zero",
         by_tiles, _heads_beyond, tuple(t[..., :12, :] for t in HEADS), exact, {}, {"relations": ["long"]}),
)  # fmt: skip
