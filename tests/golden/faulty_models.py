"""Small models of one's own, whose int8 kernels are right or have faults."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, linear

import qgate
from qgate.modes import Kernel


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    block: type[nn.Module] = Block
    count = 3

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.block() for _ in range(self.count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Filter(nn.Module):
    """A convolution over time, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.conv(x.mT).mT)


class Filters(Stack):
    block, count = Filter, 2


class Attention(nn.Module):
    scale = 16**-0.5

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        projected = (part(normed) for part in (self.q, self.k, self.v))
        q, k, v = (x.unflatten(-1, (2, 16)).transpose(1, 2) for x in projected)
        shares = (q @ k.mT * self.scale).softmax(-1)
        return x + self.o((shares @ v).transpose(1, 2).flatten(-2))


class Attentions(Stack):
    block, count = Attention, 2


class Int8(nn.Module):
    """The product of a linear layer or a convolution in int8, or with a fault."""

    def __init__(self, module: nn.Linear | nn.Conv1d, fault: str) -> None:
        super().__init__()
        self.weight, self.bias, self.fault = module.weight, module.bias, fault
        self.is_linear = isinstance(module, nn.Linear)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.fault == "no bias" else self.bias
        if self.is_linear:
            return linear(self.cast(x, -1), self.cast(self.weight, -1), bias)
        return conv1d(self.cast(x, (1, 2)), self.cast(self.weight, (1, 2)), bias, padding=1)

    def cast(self, x: Tensor, dims: int | tuple[int, int]) -> Tensor:
        scale = x.detach().abs().amax(dims, keepdim=True).clamp_min(1e-30) / 127
        scale = scale * 2 if self.fault == "double scale" else scale
        codes = x / scale
        codes = codes.trunc() if self.fault == "truncates" else codes.round()
        return x + (codes * scale - x).detach()


def kernel(faults: Mapping[str, str]) -> Callable[[qgate.Model], nn.Module]:
    """Return what builds a model whose products are in int8; faults by module, `*` for all."""

    def build(model: qgate.Model) -> nn.Module:
        built = copy.deepcopy(model.module)
        for name, module in list(built.named_modules()):
            fault = faults.get(name, faults.get("*", ""))
            if isinstance(module, nn.Linear | nn.Conv1d):
                built.set_submodule(name, Int8(module, fault))
            elif fault == "other scale":
                module.scale = 32**-0.5
        return built

    return build


def model(
    name: str, network: type[nn.Module], width: int, faults: Mapping[str, str] | None = None
) -> Callable[..., qgate.Model]:
    def build(**_settings: Any) -> qgate.Model:
        torch.manual_seed(0)
        samples = [torch.randn(2, 16, width) for _ in range(2)]
        modes = {"mine": Kernel(kernel(faults or {}), stands_for="int8")}
        return qgate.Model(network(), samples, name, modes=modes)

    return build


stack = model("stack", Stack, 32)
stack_one = model("stack", Stack, 32, {"*": "double scale"})
stack_two = model("stack", Stack, 32, {"layers.0.up": "truncates", "layers.2.down": "no bias"})
filters = model("filters", Filters, 16)
filters_one = model("filters", Filters, 16, {"layers.1.conv": "no bias"})
attention = model("attention", Attentions, 32)
attention_one = model("attention", Attentions, 32, {"layers.0": "other scale"})
