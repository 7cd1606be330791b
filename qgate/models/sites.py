"""Sites: named places of a model where a tensor flows.

A site is a module's name and a port: `layers.0.mlp.up_proj:input`. Ports are `input` (the first
tensor given), `output` (the first tensor returned), `weight`, and, for modules that take several
tensors by name, those names: `layers.0.mixer.scan:u`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from qgate.errors import QgateError
from qgate.models.mamba.scanning import Scan

Kind = Literal[
    "linear", "conv", "recurrent", "attention", "scan", "norm", "activation",
    "embedding", "block", "other",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)

_PORTS: dict[Kind, tuple[str, ...]] = {
    "linear": ("input", "weight", "output"),
    "conv": ("input", "weight", "output"),
    "scan": ("u", "dt", "B", "C", "z", "output", "state"),
    "embedding": ("weight", "output"),
}


@dataclass(frozen=True)
class Site:
    """A port of a module.

    width       input features of a linear layer, input channels of a group of a convolution
    groups      groups of channels of a convolution
    is_product  the output is the product of the input and the weight, and nothing else
    transposed  the weight is (in, out): of GPT-2's linear layers and transposed convolutions
    is_block    the module is gated as a layer
    channels    axis of the channels of a tensor that flows there
    """

    module: str
    port: str
    kind: Kind
    width: int = 0
    transposed: bool = False
    groups: int = 1
    is_product: bool = False
    is_block: bool = False
    channels: int = -1

    @property
    def is_depthwise(self) -> bool:
        """Tell if each channel of a convolution is multiplied by itself."""
        return self.groups > 1 and self.width == 1

    @property
    def name(self) -> str:
        return f"{self.module}:{self.port}"

    def channel_axis(self, tensor: Tensor) -> int:
        """Return the axis of the channels of a tensor there; an activation also takes vectors."""
        return self.channels if tensor.dim() >= -self.channels else -1

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
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent"
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    name = type(module).__name__.lower()
    if "norm" in name and next(module.children(), None) is None:
        return "norm"
    if isinstance(module, nn.modules.activation.ReLU | nn.GELU | nn.SiLU) or "silu" in name:
        return "activation"
    return "other"


_ROUNDINGS = 16.0
"""Roundings of its dtype by which a product of a layer's own code may differ."""
_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_AFTER_SAMPLES = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)


def is_plain_conv(module: nn.Module) -> bool:
    """Tell if a convolution computes what torch's do, with channels before what it slides over."""
    return any(type(module).forward is kind.forward for kind in _CONVOLUTIONS)


@torch.no_grad()
def _multiplies_alone(module: nn.Module, weight: Tensor) -> bool:
    """Tell if a linear layer returns a product, and adds none of its own, as an adapter does."""
    if is_transposed_linear(module) or type(module).forward is nn.Linear.forward:
        return True
    # What has nothing else to add is to be a product, and one that rounds is found by that.
    if weight.is_meta or {name for name, _ in module.named_parameters()} <= {"weight", "bias"}:
        return True
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.shape[-1], generator=generator).to(weight)
    try:
        # Its code may count or follow what it reads.
        actual = copy.deepcopy(module).forward(x)
        plain = functional.linear(x, weight)
        biased = functional.linear(x, weight, module._parameters.get("bias"))
        room = _ROUNDINGS * torch.finfo(x.dtype).eps * plain.double().norm()
        return any(bool((actual - y).double().norm() <= room) for y in (plain, biased))
    except Exception:  # such as a layer that takes another input
        return True


def _has_own_weight(module: nn.Module) -> bool:
    """Tell if a weight is a parameter, and not computed by a parametrization."""
    return module._parameters.get("weight") is not None


def _weight_of(module: nn.Module) -> object:
    """Return the parameter, which is not quantized to be looked at, or what stands for it."""
    return module._parameters["weight"] if _has_own_weight(module) else module.weight


def sites_of(root: nn.Module, blocks: tuple[str, ...] = ()) -> Iterator[Site]:
    """Yield every site, in the order in which modules are registered.

    Modules that only hold other modules have sites if they are `blocks`, leaves always. Those that
    compute a weight have none: they run whenever that is read.
    """
    for name, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise QgateError(
                f"{name or 'the model'} is scripted, and torch hands over no tensors inside such a "
                "module: give the one that it was scripted from."
            )
        if ".parametrizations." in f".{name}":
            continue
        kind, is_block = kind_of(module), name in blocks
        if is_block and kind == "other":
            kind = "block"
        if not name or (kind == "other" and next(module.children(), None) is not None):
            continue
        site = Site(name, "", kind, is_block=is_block)
        if isinstance(module, nn.modules.conv._ConvNd):
            site = replace(
                site,
                width=module.in_channels // module.groups,
                transposed=module.transposed,
                groups=module.groups,
                is_product=is_plain_conv(module) and _has_own_weight(module),
                channels=-1 - len(module.kernel_size) if is_plain_conv(module) else -1,
            )
        elif kind == "linear" and isinstance(weight := _weight_of(module), Tensor):
            turned = is_transposed_linear(module)
            width = int(weight.shape[0 if turned else -1])
            is_product = _has_own_weight(module) and _multiplies_alone(module, weight)
            site = replace(site, width=width, transposed=turned, is_product=is_product)
        elif isinstance(module, _AFTER_SAMPLES):
            site = replace(site, channels=1)
        for port in _PORTS.get(kind, ("input", "output")):
            yield replace(site, port=port)


def like(name: str) -> str:
    """Return what the name of a site has in common with those of other experts of its layer."""
    numbers = list(re.finditer(r"(?<=\.)\d+(?=\.)", name))
    if len(numbers) < 2:
        return name
    return f"{name[: numbers[-1].start()]}*{name[numbers[-1].end() :]}"


def any_number(site: str) -> str:
    """Return what sites of one place in layers and experts have in common."""
    return re.sub(r"\d+", "*", site)
