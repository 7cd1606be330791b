"""A mode put to work: a model that computes as the mode says, beside the one it was made from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from qgate.errors import QgateError
from qgate.models.tapping import tap
from qgate.modes.mode import Mode
from qgate.modes.plan import Plan
from qgate.modes.resolving import make_plan
from qgate.modes.simulated.mixer import casts_of
from qgate.modes.simulated.planning import simulate

if TYPE_CHECKING:
    from qgate.formats.quantizer import Quantizer
    from qgate.models.model import Model
    from qgate.models.sites import Site
    from qgate.modes.calibration import Calibration


@dataclass(frozen=True)
class Quantized:
    """A model in a mode, with the plan it follows."""

    model: Model
    mode: Mode
    plan: Plan

    def casts(self) -> dict[str, dict[str, int]]:
        """Every integer cast so far: values, how many saturated, how many were not finite."""
        return {name: cast.counts() for name, cast in casts_of(self.model.module).items()}


def apply(mode: Mode, model: Model, calibration: Calibration | None = None) -> Quantized:
    """The model in that mode; the one given stays as it is and shares its parameters.

    Shared parameters mean that gradients of the mode arrive where those of the reference do.
    """
    plan = make_plan(mode, model, calibration)
    if mode.own:
        return Quantized(_built(mode, model), mode, plan)
    base = model.in_basis(mode.basis)
    if mode.dtype is not None:
        dtype = getattr(torch, mode.dtype)
        module = copy.deepcopy(base.module).to(dtype)
        module.register_forward_pre_hook(_floats_as(dtype), with_kwargs=True)
        return Quantized(base.with_module(module), mode, plan)
    module = sharing_copy(base.module)
    if mode.choices is not None and calibration is not None:
        simulate(module, mode.choices, calibration)
    else:
        _install(module, base.sites(), plan.quantizers())
    return Quantized(base.with_module(module), mode, plan)


def _floats_as(dtype: torch.dtype) -> Callable[..., Any]:
    """A hook that gives a module its floating-point arguments in the dtype of its weights."""

    def cast(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}

    return hook


def sharing_copy(module: nn.Module) -> nn.Module:
    """A copy of the modules around the same parameters and buffers."""
    kept: dict[int, object] = {id(p): p for p in module.parameters()}
    kept |= {id(b): b for b in module.buffers()}
    return copy.deepcopy(module, kept)


def _built(mode: Mode, model: Model) -> Model:
    """What the model's own callable returns, which must not have touched the model."""
    before = model.weights_hash()
    made = model.modes[mode.name](model)
    if not isinstance(made, nn.Module):
        raise QgateError(
            f"mode {mode.name!r} of {model.name} returned {type(made).__name__}; it is a callable "
            "that takes the Model and returns a torch.nn.Module."
        )
    if made is model.module or model.weights_hash() != before:
        raise QgateError(
            f"mode {mode.name!r} of {model.name} changed the model in place, and nothing is left "
            "to compare it with: let it work on copy.deepcopy(model.module)."
        )
    return model.with_module(made)


def _install(module: nn.Module, sites: list[Site], quantizers: dict[str, Quantizer]) -> None:
    """Quantizers as hooks for what flows, as parametrizations for weights."""
    flowing: list[Site] = []
    for site in sites:
        quantizer = quantizers.get(site.name)
        if quantizer is None:
            continue
        if site.port == "weight":
            owner = module.get_submodule(site.module)
            parametrize.register_parametrization(owner, "weight", _Weight(quantizer), unsafe=True)
        else:
            flowing.append(site)

    def take(site: Site, tensor: Tensor) -> Tensor:
        return quantizers[site.name](tensor)

    tap(module, flowing, take)


class _Weight(nn.Module):
    """The quantized weight, kept while the weight stays the same and nobody wants gradients."""

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self.quantizer = quantizer
        self._kept: tuple[int, Tensor] | None = None

    def forward(self, weight: Tensor) -> Tensor:
        if torch.is_grad_enabled() and weight.requires_grad:
            return self.quantizer(weight)
        if self._kept is None or self._kept[0] != weight._version:
            self._kept = (weight._version, self.quantizer(weight.detach()))
        return self._kept[1]

    def extra_repr(self) -> str:
        return repr(self.quantizer)
