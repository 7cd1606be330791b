"""Models of a user's own whose kernels quantize for real, each with one fault or with none."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import qgate
from qgate.modes import Kernel, Rule

Cast = Callable[[Tensor], Tensor]
WIDTH, HEADS, GROUPS, TOKENS, WORDS = 64, 4, 2, 32, 50


class Norm(nn.Module):
    """RMS norm, whose fault is an attribute."""

    fault = ""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        eps = 1e-3 if self.fault == "eps" else 1e-5
        mean = x.square().mean(-1, keepdim=True)
        if self.fault == "n - 1":
            mean = x.square().sum(-1, keepdim=True) / (WIDTH - 1)
        if self.fault == "mean of magnitudes":
            return x / (x.abs().mean(-1, keepdim=True) + eps) * self.weight
        if self.fault == "no weight":
            return x * torch.rsqrt(mean + eps)
        if self.fault == "weight plus 1":
            return x * torch.rsqrt(mean + eps) * (1 + self.weight)
        return x * torch.rsqrt(mean + eps) * self.weight


class Attention(nn.Module):
    """Causal attention of grouped queries with rotary positions."""

    fault = ""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, GROUPS * size, bias=False)
        self.v_proj = nn.Linear(WIDTH, GROUPS * size, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        fault, (batch, tokens, _) = self.fault, x.shape
        size, repeats = WIDTH // HEADS, HEADS // GROUPS
        q, k, v = (
            of(x).view(batch, tokens, -1, size).transpose(1, 2)
            for of in (self.q_proj, self.k_proj, self.v_proj)
        )
        late = int(fault == "position of queries late")
        q, k = self._turned(q, late), self._turned(k, 0)
        if fault == "values turned":
            v = self._turned(v, 0)
        if fault == "heads repeated, not interleaved":
            k, v = k.repeat(1, repeats, 1, 1), v.repeat(1, repeats, 1, 1)
        else:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scale = {"scale of padded heads": 32, "scale of the width": WIDTH}.get(fault, size)
        scores = q @ k.mT / math.sqrt(scale)
        if fault == "scores 1 % large":
            scores = scores * 1.01
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril(int(fault == "mask late"))
        if fault == "mask early":
            mask = mask.tril(-1)
            mask[0, 0] = True
        if fault == "window":
            mask = mask.triu(-7)
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        if fault == "weights in float16":
            weights = weights.half().float()
        mixed = weights @ v
        if fault == "first key left out":
            mixed = mixed - weights[..., :1] * v[:, :, :1]
        if fault == "heads not joined":
            return self.o_proj(mixed.reshape(batch, tokens, -1))
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))

    def _turned(self, x: Tensor, late: int) -> Tensor:
        tokens, size = x.shape[-2:]
        base = 5e3 if self.fault == "rotary base" else 1e4
        frequencies = base ** (-torch.arange(0, size, 2) / size)
        positions = torch.arange(tokens) + late
        if self.fault == "positions wrap":
            positions = positions % 512
        angles = positions[:, None] * frequencies
        if self.fault == "rotary pairs interleaved":
            even, odd = x[..., ::2], x[..., 1::2]
            sides = (
                even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
            )  # fmt: skip
            return torch.stack(sides, -1).flatten(-2)
        first_half, right = x.chunk(2, -1)
        turned = torch.cat([-right, first_half], -1)
        if self.fault == "rotary halves swapped":
            turned = -turned
        if self.fault == "rotary positions left out":
            return x
        angles = torch.cat([angles, angles], -1)
        return x * angles.cos() + turned * angles.sin()


class Mlp(nn.Module):
    fault = ""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        if self.fault == "gate and up swapped":
            gate, up = up, gate
        if self.fault == "gate clamped":
            gate = gate.clamp(max=0.5)
        if self.fault == "gelu for silu":
            return self.down(functional.gelu(gate) * up)
        if self.fault == "no activation":
            return self.down(gate * up)
        if self.fault == "up left out":
            return self.down(functional.silu(gate))
        return self.down(functional.silu(gate) * up)


class Layer(nn.Module):
    fault = ""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = Norm(), Attention(), Norm(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self.attention(self.norm1(x))
        if self.fault == "residual of attention dropped":
            hidden = hidden - x
        mixed = self.mlp(self.norm2(hidden))
        if self.fault == "residual of the MLP dropped":
            return mixed
        if self.fault == "residual from before attention":
            return x + mixed
        return hidden + (2 * mixed if self.fault == "MLP added twice" else mixed)


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


# Casts, each by another way than the definitions of qgate -----------------------------------------


def int8_rows(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (x / scale).round().clamp(-127, 127) * scale


def fp8_rows(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def mxfp8(x: Tensor) -> Tensor:
    blocks = x.unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30).log2().floor() - 8
    scaled = (blocks * torch.exp2(-exponents)).clamp(-448, 448)
    return (scaled.to(torch.float8_e4m3fn).float() * torch.exp2(exponents)).flatten(-2)


def int4_groups(x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 7
    return ((groups / scale).round().clamp(-7, 7) * scale).flatten(-2)


@dataclass(frozen=True)
class Format:
    """What a kernel stands for, and right casts of its inputs and weights."""

    stands_for: Any
    cast: Cast
    of_weight: Cast


FORMATS = {
    "int8": Format("int8", int8_rows, int8_rows),
    "fp8": Format(Rule(":(input|weight)$", "fp8_e4m3", per="row"), fp8_rows, fp8_rows),
    "mxfp8": Format("mxfp8", mxfp8, mxfp8),
    "w4": Format(Rule(":weight$", "int4", per="group", group=32), lambda x: x, int4_groups),
}


Product = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


class OwnLinear(nn.Module):
    """A kernel in the place of a linear layer."""

    def __init__(self, of: nn.Linear, product: Product) -> None:
        super().__init__()
        self.weight, self.bias, self.product = of.weight, of.bias, product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def product_of(fmt: str, cast: Cast | None = None, of_weight: Cast | None = None) -> Product:
    """Return a right kernel, or one with another cast."""
    right = FORMATS[fmt]
    cast, of_weight = cast or right.cast, of_weight or right.of_weight
    return lambda x, w, b: functional.linear(cast(x), of_weight(w), b)


def own_model(fmt: str, product: Product | None = None, fault: str = "", seed: int = 0) -> Any:
    """Return a model with its own mode `mine`: a faulty product, or a fault between products."""
    torch.manual_seed(seed)

    def build(reference: qgate.Model) -> nn.Module:
        own = copy.deepcopy(reference.module)
        for name, module in [*own.named_modules()]:
            if hasattr(module, "fault") and name.startswith("layers"):
                module.fault = fault
            if isinstance(module, nn.Linear) and name != "head":
                own.set_submodule(name, OwnLinear(module, product or product_of(fmt)))
        return own

    samples = [torch.randint(0, WORDS, (1, TOKENS)) for _ in range(2)]
    kernel = Kernel(build, stands_for=FORMATS[fmt].stands_for)
    return qgate.Model(Net(), samples, "net", head=("head",), modes={"mine": kernel})
