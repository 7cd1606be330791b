"""Right kernels in plain torch, as people write them: what `code_mutants` changes one place of.

Each has a `check_NAME` that gives its arguments, its reference and the options of the check.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import qgate
from qgate.testing import quantized, tiles

GENERATOR = torch.Generator().manual_seed(5)
ROW_INT8 = qgate.Quantizer("int8", granularity="channel", axis=0)
NO_TIME = ["one", "strided", "zero rows", "large", "small", "dominant", "batch", "permuted"]
"""Relations of recurrences, whose tokens depend on those before."""
Checked = tuple[tuple[Tensor, ...], Any, dict[str, Any]]


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR) * scale


def int8_linear(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    sx = x.abs().amax(-1, keepdim=True) / 127
    sx = torch.where(sx == 0, torch.ones_like(sx), sx)
    sw = w.abs().amax(-1, keepdim=True) / 127
    sw = torch.where(sw == 0, torch.ones_like(sw), sw)
    qx = torch.clamp(torch.round(x / sx), -127, 127)
    qw = torch.clamp(torch.round(w / sw), -127, 127)
    total = torch.zeros(x.shape[0], w.shape[0])
    terms = x.shape[1]
    for start in range(0, terms, 64):
        end = min(start + 64, terms)
        total = total + qx[:, start:end] @ qw[:, start:end].t()
    return total * sx * sw.t() + bias


def check_int8_linear() -> Checked:
    options = {"inputs": {0: ROW_INT8, 1: ROW_INT8}, "convention": "scale amax/127"}
    return (normal(40, 160), normal(72, 160), normal(72)), functional.linear, options


def fp8_tiles(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], w.shape[0])
    for k in range(0, x.shape[1], 128):
        part = x[:, k : k + 128]
        sx = part.abs().amax(-1, keepdim=True) / 448
        sx = torch.where(sx == 0, torch.ones_like(sx), sx)
        qx = (part / sx).to(torch.float8_e4m3fn).float()
        for n in range(0, w.shape[0], 128):
            tile = w[n : n + 128, k : k + 128]
            sw = tile.abs().amax() / 448
            sw = torch.where(sw == 0, torch.ones_like(sw), sw)
            qw = (tile / sw).to(torch.float8_e4m3fn).float()
            out[:, n : n + 128] = out[:, n : n + 128] + (qx @ qw.t()) * sx * sw
    return out


def check_fp8_tiles() -> Checked:
    rows = qgate.Quantizer("fp8_e4m3", granularity="block", block=128)
    inputs = {0: rows, 1: tiles("fp8_e4m3", 128, 128)}
    return (normal(20, 256), normal(160, 256)), functional.linear, {"inputs": inputs}


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, heads, count, width = q.shape
    keys = k.shape[2]
    k = k.repeat_interleave(heads // k.shape[1], 1)
    v = v.repeat_interleave(heads // v.shape[1], 1)
    out = torch.zeros(batch, heads, count, width)
    for m in range(0, count, 32):
        end = min(m + 32, count)
        queries = q[:, :, m:end] / math.sqrt(width)
        top = torch.full((batch, heads, end - m, 1), -math.inf)
        total = torch.zeros(batch, heads, end - m, 1)
        sums = torch.zeros(batch, heads, end - m, width)
        for n in range(0, keys, 16):
            last = min(n + 16, keys)
            scores = queries @ k[:, :, n:last].transpose(-1, -2)
            rows = torch.arange(m, end)[:, None]
            columns = torch.arange(n, last)[None, :]
            scores = scores.masked_fill(columns > rows + (keys - count), -math.inf)
            larger = torch.maximum(top, scores.amax(-1, keepdim=True))
            finite = torch.where(torch.isinf(larger), torch.zeros_like(larger), larger)
            p = torch.exp(scores - finite)
            shrink = torch.exp(top - finite)
            total = total * shrink + p.sum(-1, keepdim=True)
            sums = sums * shrink + p @ v[:, :, n:last]
            top = larger
        out[:, :, m:end] = sums / total
    return out


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def check_flash() -> Checked:
    return (normal(2, 4, 48, 32), normal(2, 2, 48, 32), normal(2, 2, 48, 32)), _causal, {}


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    g = x @ gate.t()
    h = g / (1 + torch.exp(-g)) * (x @ up.t())
    largest = h.abs().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, torch.ones_like(largest), largest / 448)
    codes = torch.clamp(h / scale, -448, 448).to(torch.float8_e4m3fn).float()
    return (codes @ down.t()) * scale


def check_swiglu() -> Checked:
    def like(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        h = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
        h = quantized("h", h, "fp8_e4m3", granularity="channel", axis=0)
        return functional.linear(h, down)

    weights = normal(80, 48, scale=0.2), normal(80, 48, scale=0.2), normal(40, 80, scale=0.1)
    return (normal(24, 48), *weights), like, {}


def rms_int8(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
    h = x + residual
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * w
    scale = y.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.clamp(torch.round(y / scale), -128, 127) * scale


def check_rms_int8() -> Checked:
    def like(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
        h = x + residual
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * w

    tensors = normal(33, 96), normal(33, 96), 1 + normal(96, scale=0.1)
    return tensors, like, {"output": ROW_INT8, "convention": "scale amax/127"}


def paged(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    out = torch.zeros(q.shape[0], q.shape[1], q.shape[2])
    page = keys.shape[1]
    for row in range(q.shape[0]):
        length = int(lengths[row])
        listed_keys, listed_values = [], []
        for number in range((length + page - 1) // page):
            block = int(table[row, number])
            filled = min(page, length - number * page)
            listed_keys.append(keys[block, :filled])
            listed_values.append(values[block, :filled])
        scores = torch.einsum("hd,nhd->hn", q[row], torch.cat(listed_keys)) * q.shape[2] ** -0.5
        out[row] = torch.einsum("hn,nhd->hd", torch.softmax(scores, -1), torch.cat(listed_values))
    return out


def check_paged() -> Checked:
    def like(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        k, v = keys[table].flatten(1, 2), values[table].flatten(1, 2)
        scores = torch.einsum("bhd,bnhd->bhn", q, k) / math.sqrt(q.shape[-1])
        hidden = torch.arange(k.shape[1])[None] >= lengths[:, None]
        weights = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1)
        return torch.einsum("bhn,bnhd->bhd", weights, v)

    table = torch.randperm(20, generator=GENERATOR)[:12].reshape(4, 3)
    caches = normal(20, 8, 3, 16), normal(20, 8, 3, 16)
    return (normal(4, 3, 16), *caches, table, torch.tensor([24, 7, 16, 19])), like, {}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    count, words = logits.shape
    top = torch.full((count,), -math.inf)
    total = torch.zeros(count)
    hit = torch.zeros(count)
    for start in range(0, words, 50):
        end = min(start + 50, words)
        part = logits[:, start:end]
        larger = torch.maximum(top, part.amax(-1))
        total = total * torch.exp(top - larger) + torch.exp(part - larger[:, None]).sum(-1)
        top = larger
        inside = (labels >= start) & (labels < end)
        column = torch.where(inside, labels - start, torch.zeros_like(labels))
        hit = torch.where(inside, part.gather(1, column[:, None])[:, 0], hit)
    return top + torch.log(total) - hit


def check_cross_entropy() -> Checked:
    def like(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits, labels, reduction="none")

    labels = torch.randint(0, 130, (30,), generator=GENERATOR)
    return (normal(30, 130, scale=2), labels), like, {}


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    state = torch.zeros(q.shape[0], q.shape[2], v.shape[2])
    out = []
    for t in range(q.shape[1]):
        key = k[:, t] / torch.sqrt((k[:, t] * k[:, t]).sum(-1, keepdim=True) + 1e-6)
        stored = torch.einsum("bd,bde->be", key, state)
        step = torch.sigmoid(beta[:, t])[:, None] * (v[:, t] - stored)
        state = state + torch.einsum("bd,be->bde", key, step)
        out.append(torch.einsum("bd,bde->be", q[:, t] * q.shape[2] ** -0.5, state))
    return torch.stack(out, 1)


def check_delta_rule() -> Checked:
    def like(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        state, out = torch.zeros(q.shape[0], q.shape[2], v.shape[2], dtype=q.dtype), []
        for t in range(q.shape[1]):
            key = k[:, t, :, None]
            error = v[:, t] - (key * state).sum(1)
            state = state + key * (beta[:, t, None].sigmoid() * error)[:, None]
            out.append((q[:, t, :, None] * state).sum(1))
        return torch.stack(out, 1) / math.sqrt(q.shape[2])

    tensors = normal(2, 20, 8), normal(2, 20, 8), normal(2, 20, 6), normal(2, 20)
    return tensors, like, {"relations": NO_TIME}
