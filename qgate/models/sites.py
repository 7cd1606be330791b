"""Sites: named places of a model where a tensor flows.

A site is a module's name and a port: `layers.0.mlp.up_proj:input`. Ports are `input` (the first
tensor given), `output` (the first tensor returned), `weight`, and, for modules that take several
tensors by name, those names: `layers.0.mixer.scan:u`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from qgate.models.mamba.scanning import Scan

Kind = Literal["linear", "conv", "scan", "norm", "activation", "embedding", "block", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_PORTS: dict[Kind, tuple[str, ...]] = {
    "linear": ("input", "weight", "output"),
    "conv": ("input", "weight", "output"),
    "scan": ("u", "dt", "B", "C", "z", "output", "state"),
    "embedding": ("weight", "output"),
}


@dataclass(frozen=True)
class Site:
    """A port of a module; `width` is the number of input features of a linear layer."""

    module: str
    port: str
    kind: Kind
    width: int = 0
    transposed: bool = False

    @property
    def name(self) -> str:
        return f"{self.module}:{self.port}"

    def __str__(self) -> str:
        return self.name


def is_transposed_linear(module: nn.Module) -> bool:
    """Tell if a module is a linear layer of GPT-2, whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def kind_of(module: nn.Module) -> Kind:
    if isinstance(module, nn.Linear) or is_transposed_linear(module):
        return "linear"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "conv"
    if isinstance(module, Scan):
        return "scan"
    if isinstance(module, nn.Embedding):
        return "embedding"
    name = type(module).__name__.lower()
    if "norm" in name:
        return "norm"
    if isinstance(module, nn.modules.activation.ReLU | nn.GELU | nn.SiLU) or "silu" in name:
        return "activation"
    return "other"


def sites_of(root: nn.Module, blocks: tuple[str, ...] = ()) -> Iterator[Site]:
    """Yield every site, in the order in which modules are registered.

    Modules that only hold other modules have sites if they are `blocks`, leaves always.
    """
    for name, module in root.named_modules():
        kind: Kind = "block" if name in blocks else kind_of(module)
        if not name or (kind == "other" and next(module.children(), None) is not None):
            continue
        turned = is_transposed_linear(module)
        width = 0
        if kind == "linear":
            width = int(module.weight.shape[0 if turned else -1])
        for port in _PORTS.get(kind, ("input", "output")):
            yield Site(name, port, kind, width, turned)
