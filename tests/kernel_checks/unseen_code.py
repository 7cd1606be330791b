"""Faulty norms, attention, rotations and gates for which no cause was designed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import hardswish, sigmoid, silu

from tests.kernel_checks.unseen_products import UnseenFault

EPS = 1e-5


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden(q, k), -math.inf)
    return scores.softmax(-1) @ v


def turn(x: Tensor) -> Tensor:
    tokens, size = x.shape[-2:]
    angles = torch.arange(tokens)[:, None] * 1e4 ** (-torch.arange(0, size, 2) / size)
    return turned(x, angles)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    low, right = x.chunk(2, -1)
    angles = torch.cat([angles, angles], -1).to(x.dtype)
    return x * angles.cos() + torch.cat([-right, low], -1) * angles.sin()


def gate(g: Tensor, u: Tensor) -> Tensor:
    return silu(g) * u


RIGHT = {"norm": norm, "attention": attention, "turn": turn, "gate": gate}


def hidden(q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(k.shape[-2]) > torch.arange(q.shape[-2])[:, None]


def _root(x: Tensor, mean: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(mean + EPS) * weight


def _newton(x: Tensor, weight: Tensor) -> Tensor:
    """Approximate the root from the float's bits with one step, which is off by up to 0.2 %."""
    mean = x.float().square().mean(-1, keepdim=True) + EPS
    guess = (0x5F3759DF - (mean.view(torch.int32) >> 1)).view(torch.float32)
    return x * (guess * (1.5 - mean / 2 * guess * guess)) * weight


def _attend(
    change: Any = None, weights: Any = None, values: Any = None, mask: float = -math.inf
) -> Any:
    def code(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores if change is None else change(scores)
        scores = scores.masked_fill(hidden(q, k), mask)
        p = scores.softmax(-1) if weights is None else weights(scores)
        return p @ (v if values is None else values(v))

    return code


def _one_more(scores: Tensor) -> Tensor:
    e = scores.exp()
    return e / (e.sum(-1, keepdim=True) + 1)


def _by_columns(scores: Tensor) -> Tensor:
    return scores.softmax(-2).nan_to_num()


def _in_int8(p: Tensor) -> Tensor:
    return (p.softmax(-1) * 127).round() / 127


def _alibi(scores: Tensor) -> Tensor:
    far = torch.arange(scores.shape[-1]) - torch.arange(scores.shape[-2])[:, None]
    return scores + far * 0.25


def _heads(order: str) -> Any:
    def code(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = attention(q, k, v)
        if order == "last zero":
            y = y.clone()
            y[:, -1] = 0
            return y
        return y.roll(1, 1)

    return code


def _frequencies(size: int, change: float = 1.0) -> Tensor:
    return 1e4 ** (-torch.arange(0, size, 2) / size * change)


def _angles(kind: str) -> Any:
    def code(x: Tensor) -> Tensor:
        tokens, size = x.shape[-2:]
        positions = torch.arange(tokens).float()
        frequencies = _frequencies(size, 0.5 if kind == "exponent" else 1.0)
        if kind == "reversed":
            positions = positions.flip(0)
        if kind == "interpolated":
            positions = positions / 2
        if kind == "order of frequencies":
            frequencies = frequencies.flip(0)
        if kind == "degrees":
            positions = positions * math.pi / 180
        if kind == "int8 of positions":
            positions = (positions + 8) % 16 - 8
        return turned(x, positions[:, None] * frequencies)

    return code


def _sin_dropped(x: Tensor) -> Tensor:
    tokens, size = x.shape[-2:]
    angles = torch.arange(tokens)[:, None] * _frequencies(size)
    return x * torch.cat([angles, angles], -1).to(x.dtype).cos()


CODE = (
    UnseenFault("gain twice", "taken twice", "int8", lambda x, w: norm(x, w) * w, "norm"),
    UnseenFault("mean of the first half", "entries 0 to 31 alone", "int8", lambda x, w: _root(x, x[..., : x.shape[-1] // 2].square().mean(-1, keepdim=True), w), "norm"),
    UnseenFault("statistics of all tokens", "mean is that of all rows", "int8", lambda x, w: _root(x, x.square().mean((-2, -1), keepdim=True), w), "norm"),
    UnseenFault("mean subtracted", "taken without its mean", "int8", lambda x, w: norm(x - x.mean(-1, keepdim=True), w), "norm"),
    UnseenFault("gain of the next channel", "(weight|argument 1) .*(one entry|next|moved|late|early)", "int8", lambda x, w: norm(x, w.roll(1)), "norm"),
    UnseenFault("statistics of the token before", "row before", "int8", lambda x, w: _root(x, x.square().mean(-1, keepdim=True).roll(1, -2), w), "norm"),
    UnseenFault("approximate root", "factor each, 0.99", "int8", _newton, "norm"),
    UnseenFault("no eps at all, 1e-2 for 1e-5", "eps is 0.01", "int8", lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2) * w, "norm"),
    UnseenFault("gain in bfloat16", "(weight|argument 1) .*rounded to bfloat16", "int8", lambda x, w: norm(x, w.bfloat16().to(x.dtype)), "norm"),
    UnseenFault("exp2 without log2 e", r"(0.693|ln\(2\)) times", "int8", _attend(lambda s: s * math.log(2)), "attention"),
    UnseenFault("softmax over queries", "softmax is over the rows", "int8", _attend(weights=_by_columns), "attention"),
    UnseenFault("one more in the sum", "one more key of zeros", "int8", _attend(weights=_one_more), "attention"),
    UnseenFault("mask of -10", "masked with -10", "int8", _attend(mask=-10.0), "attention"),
    UnseenFault("weights in int8", "probabilities .*steps of 1/127", "int8", _attend(weights=_in_int8), "attention"),
    UnseenFault("scale of scores twice", r"scores .*1/sqrt\(16\) times", "int8", _attend(lambda s: s / 4), "attention"),
    UnseenFault("alibi where none is", "bias by distance is added", "int8", _attend(_alibi), "attention"),
    UnseenFault("last head zero", "(channels|columns) 48 to 63 .*zero|(head|index) 3 .*zero", "int8", _heads("last zero"), "attention"),
    UnseenFault("heads of the next", "(head|columns|indices).* hold", "int8", _heads("next"), "attention"),
    UnseenFault("values of the token before", "(argument 2|v_proj|value).*(one entry|late|early|moved)", "int8", _attend(values=lambda v: v.roll(1, -2)), "attention"),
    UnseenFault("scores not divided", r"scores .* sqrt\(16\) times", "int8", _attend(lambda s: s * math.sqrt(16)), "attention"),
    UnseenFault("sigmoid for softmax", "sigmoid", "int8", _attend(weights=sigmoid), "attention"),
    UnseenFault("exponent of frequencies halved", "base of the powers is 100", "int8", _angles("exponent"), "turn"),
    UnseenFault("positions reversed", "position", "int8", _angles("reversed"), "turn"),
    UnseenFault("positions interpolated", "positions are half", "int8", _angles("interpolated"), "turn"),
    UnseenFault("frequencies reversed", "(frequenc|powers|numbers in steps of 2).* reverse", "int8", _angles("order of frequencies"), "turn"),
    UnseenFault("degrees", "pi / 180", "int8", _angles("degrees"), "turn"),
    UnseenFault("sine left out", "sin is left out|result of a multiplication is not added", "int8", _sin_dropped, "turn"),
    UnseenFault("positions beyond 8 wrap", "positions wrap at 8", "int8", _angles("int8 of positions"), "turn"),
    UnseenFault("quick gelu for silu", "quick gelu is computed", "int8", lambda g, u: g * sigmoid(1.702 * g) * u, "gate"),
    UnseenFault("hard swish for silu", "hard ?swish", "int8", lambda g, u: hardswish(g) * u, "gate"),
    UnseenFault("sigmoid for silu", "sigmoid", "int8", lambda g, u: sigmoid(g) * u, "gate"),
    UnseenFault("squared relu for silu", "squared relu is computed", "int8", lambda g, u: torch.relu(g).square() * u, "gate"),
    UnseenFault("activation of both", "silu is computed of (argument 1|mlp.up:output), too", "int8", lambda g, u: silu(g) * silu(u), "gate"),
    UnseenFault("activation behind the product", "silu comes after the multiplication", "int8", lambda g, u: silu(g * u), "gate"),
    UnseenFault("added, not multiplied", "is added, not multiplied", "int8", lambda g, u: silu(g) + u, "gate"),
    UnseenFault("up of the next channel", "(argument 1|up).*(one entry|next|late|early)", "int8", lambda g, u: silu(g) * u.roll(1, -1), "gate"),
)  # fmt: skip
