"""More faults for which no cause was designed, written after the others had been named."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from tests.gate.own_kernels import FORMATS, int4_groups, int8_rows, product_of
from tests.kernel_checks.unseen_code import EPS, attention, gate, hidden, norm, turned
from tests.kernel_checks.unseen_products import UnseenFault


def _int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (x / scale).round(), scale


def _late_rows(w: Tensor) -> Tensor:
    codes, scale = _int8(w)
    return codes * scale[torch.arange(len(w)).clamp_max(16)]


def _columns_again(x: Tensor) -> Tensor:
    return int8_rows(x)[..., torch.arange(x.shape[-1]) % 48]


def _bias_before_scales(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    (a, scale_a), (c, scale_c) = _int8(x), _int8(w)
    sums = linear(a, c)
    return (sums if b is None else sums + b) * scale_a * scale_c.reshape(-1)


def _offset_kept(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    (a, scale_a), (c, scale_c) = _int8(x), _int8(w)
    y = linear(a + 128, c) * scale_a * scale_c.reshape(-1)
    return y if b is None else y + b


def _sums_in_halves(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Round the sums of each 32 terms to float16, as a small accumulator does."""
    (a, scale_a), (c, scale_c) = _int8(x), _int8(w)
    sums = sum(
        (linear(p, q).half() for p, q in zip(a.split(32, -1), c.split(32, -1), strict=True)),
        torch.zeros((), dtype=torch.float16),
    )
    y = sums.float() * scale_a * scale_c.reshape(-1)
    return y if b is None else y + b


def _twice_biased(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return product_of("int8")(x, w, None if b is None else 2 * b)


def _last_column_copied(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = product_of("int8")(x, w, b)
    return torch.cat([y[..., :-1], y[..., -2:-1]], -1)


def _tiles_turned(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = product_of("int8")(x, w, b).clone()
    y[..., :8, :8] = y[..., :8, :8].mT.clone()
    return y


def _rows_in_halves(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = product_of("int8")(x, w, b)
    return torch.cat([y[..., y.shape[-2] // 2 :, :], y[..., : y.shape[-2] // 2, :]], -2)


def _large_lost(x: Tensor) -> Tensor:
    y = FORMATS["fp8"].cast(x)
    return y.where(x.abs() < 0.95 * x.abs().amax(-1, keepdim=True), 0.0)


def _e5m2(w: Tensor) -> Tensor:
    scale = w.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    return (w / scale).to(torch.float8_e5m2).float() * scale


def _bf16_before(x: Tensor) -> Tensor:
    return FORMATS["mxfp8"].cast((x * 1.01).bfloat16().float())


def _no_zero(w: Tensor) -> Tensor:
    groups = w.unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 7
    codes = (groups / scale).round().clamp(-7, 7)
    return (codes.where(codes != 0, torch.ones(())) * scale).flatten(-2)


def _groups_of_64(w: Tensor) -> Tensor:
    groups = w.unflatten(-1, (-1, w.shape[-1] if w.shape[-1] % 64 else 64))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 7
    return ((groups / scale).round() * scale).flatten(-2)


def _root_then_eps(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True).sqrt() + 100 * EPS) * weight


def _mean_of_padded(x: Tensor, weight: Tensor) -> Tensor:
    mean = x.square().sum(-1, keepdim=True) / 80
    return x * torch.rsqrt(mean + EPS) * weight


def _capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 2 * torch.tanh(q @ k.mT / 4 / 2)
    return scores.masked_fill(hidden(q, k), -torch.inf).softmax(-1) @ v


def _normed_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q * torch.rsqrt(q.square().mean(-1, keepdim=True) + EPS), k, v)


def _dropped_small(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT / 4).masked_fill(hidden(q, k), -torch.inf).softmax(-1)
    return p.where(p > 0.02, 0.0) @ v


def _angles(x: Tensor, share: float = 1.0, sign: float = 1.0, base: float = 1e4) -> Tensor:
    tokens, size = x.shape[-2:]
    frequencies = base ** (-torch.arange(0, size, 2) / size)
    frequencies[int(share * len(frequencies)) :] = 0
    return turned(x, sign * torch.arange(tokens)[:, None] * frequencies)


FURTHER = (
    UnseenFault("scale of row 16 from there on", "(weight|argument 1) .*number 16 of the (rows|groups) for all", "int8", product_of("int8", None, _late_rows)),
    UnseenFault("columns beyond 48 begin again", "(input|argument 0) .*first entry again, from entry 48", "int8", product_of("int8", _columns_again)),
    UnseenFault("bias before scales", "a bias is dropped", "int8", _bias_before_scales),
    UnseenFault("offset of 128 kept", "(input|argument 0) .*128|offset", "int8", _offset_kept),
    UnseenFault("sums in float16", "sums of codes .*float16", "int8", _sums_in_halves),
    UnseenFault("bias twice", "(bias|argument 2) .*(twice|2 times)", "int8", _twice_biased),
    UnseenFault("last column copied", "(column|index) (31|63|127|the last).*(holds?|what)", "int8", _last_column_copied),
    UnseenFault("first tile transposed", "tiles of .* are transposed", "int8", _tiles_turned),
    UnseenFault("halves of rows exchanged", "rows .*hold|rows hold others", "int8", _rows_in_halves),
    UnseenFault("largest values become zero", "(input|argument 0) .*(large|zero|satur)", "fp8", product_of("fp8", _large_lost)),
    UnseenFault("weights in e5m2", "(weight|argument 1) .*e5m2", "fp8", product_of("fp8", None, _e5m2)),
    UnseenFault("1 % too large before the cast", "1[.]0[0-9]+ times the expected", "mxfp8", product_of("mxfp8", _bf16_before)),
    UnseenFault("code 0 is read as 1", "(weight|argument 1) .*(code|0 as)", "w4", product_of("w4", None, _no_zero)),
    UnseenFault("groups of 64", "(weight|argument 1) has blocks of (64|128)", "w4", product_of("w4", None, _groups_of_64)),
    UnseenFault("weights in groups, input too", "(input|argument 0) is (quantized|not)", "w4", product_of("w4", int4_groups)),
    UnseenFault("eps beside the root", "eps .*outside the root", "int8", _root_then_eps, "norm"),
    UnseenFault("mean of 80", "1.12 times", "int8", _mean_of_padded, "norm"),
    UnseenFault("gain of the first half again", "(weight|argument 1) .*first entry again, from entry 32", "int8", lambda x, w: norm(x, torch.cat([w[..., :32], w[..., :32]], -1)), "norm"),
    UnseenFault("scores capped at 2", "capped at 2 by tanh", "int8", _capped, "attention"),
    UnseenFault("queries normed", "divided by its RMS", "int8", _normed_queries, "attention"),
    UnseenFault("small weights dropped", "probabilit.*(small|below|zero|flush)", "int8", _dropped_small, "attention"),
    UnseenFault("keys of the head before", "argument 1 .*early|columns 16 to 31 of attention.k_proj", "int8", lambda q, k, v: attention(q, k.roll(1, 1), v), "attention"),
    UnseenFault("half of the head is turned", "powers beyond the first half are zero", "int8", lambda x: _angles(x, share=0.5), "turn"),
    UnseenFault("turned the other way", "turn the other way", "int8", lambda x: _angles(x, sign=-1.0), "turn"),
    UnseenFault("base of 500,000", "base of the powers is 500,?000", "int8", lambda x: _angles(x, base=5e5), "turn"),
    UnseenFault("gate clamped at 0.5", "(argument 0|mlp.gate:output) is clamped to at most 0.5", "int8", lambda g, u: gate(g.clamp_max(0.5), u), "gate"),
    UnseenFault("up plus 1", "with one added", "int8", lambda g, u: silu(g) * (u + 1), "gate"),
    UnseenFault("gate 3 % too large", "(argument 0|mlp.gate:output) counts 1.03 times", "int8", lambda g, u: gate(g * 1.03, u), "gate"),
    UnseenFault("gate negated", "(argument 0|mlp.gate:output) counts -1 times", "int8", lambda g, u: gate(-g, u), "gate"),
    UnseenFault("gate and up in pairs", "halves of one row, but stand in turns", "int8", lambda g, u: gate(*(torch.stack([g, u], -1).flatten(-2)[..., i * g.shape[-1] : (i + 1) * g.shape[-1]] for i in (0, 1))), "gate"),
)  # fmt: skip
