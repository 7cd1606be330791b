"""A mode put to work: a model that computes as the mode says, beside the one it was made from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.models.fingerprints import fingerprint
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
    """The model in that mode; the one given stays as it is.

    Modes of rules share the parameters of the model in their basis, so that gradients arrive where
    those of the reference do; a dtype or a kernel of one's own needs a copy.
    """
    if calibration is not None and mode.calibrated and calibration.weights != model.weights_hash():
        raise QgateError(
            f"the calibration was made with other weights ({calibration.model}, "
            f"{calibration.weights[:12]}) than those of {model.name} now "
            f"({model.weights_hash()[:12]}): calibrate again."
        )
    plan = make_plan(mode, model, calibration)
    if mode.own:
        return Quantized(_built(mode, model), mode, plan)
    base = model.in_basis(mode.basis)
    if mode.dtype is not None:
        dtype = getattr(torch, mode.dtype)
        module = in_dtype(base.module, dtype)
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


def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy whose stored weights are in another dtype.

    What a module computes for itself, such as the frequencies of rotary positions, stays as it is,
    and so does what a Hugging Face model wants to keep in float32.
    """
    made = copy.deepcopy(module)
    kept = [
        *(getattr(made, "_keep_in_fp32_modules", None) or ()),
        *(getattr(made, "_keep_in_fp32_modules_strict", None) or ()),
    ]
    with torch.no_grad():
        for name, tensor in made.state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and not set(kept) & set(name.split(".")):
                tensor.data = tensor.data.to(dtype)
    return made


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
    if made is model.module or _weights_now(model) != before:
        raise QgateError(
            f"mode {mode.name!r} of {model.name} changed the model in place, and nothing is left "
            "to compare it with: let it work on copy.deepcopy(model.module)."
        )
    return model.with_module(made)


def _weights_now(model: Model) -> str:
    try:
        return model.weights_hash()
    except (NotImplementedError, RuntimeError):
        return "weights that are not plain tensors any more"


def _install(module: nn.Module, sites: list[Site], quantizers: dict[str, Quantizer]) -> None:
    """Quantizers as hooks for what flows, and in place of the attribute for weights."""
    flowing: list[Site] = []
    for site in sites:
        quantizer = quantizers.get(site.name)
        if quantizer is None:
            continue
        if site.port == "weight":
            _quantize_weight(module.get_submodule(site.module), quantizer)
        else:
            flowing.append(site)
    silent = {site.name for site in flowing}

    def take(site: Site, tensor: Tensor) -> Tensor:
        silent.discard(site.name)
        return quantizers[site.name](tensor)

    tap(module, flowing, take)

    def check(_module: nn.Module, _args: Any, _result: Any) -> None:
        if silent:
            first = sorted(silent)[0]
            raise QgateError(
                f"{len(silent)} quantizers of this mode were passed by nothing, {first} among "
                "them: the forward pass does not go through the modules it seems to be made of."
            )

    module.register_forward_hook(check)


def _quantize_weight(owner: nn.Module, quantizer: Quantizer) -> None:
    """`owner.weight` reads quantized, while the parameter stays what and where it was."""
    made = _Weight(quantizer)
    plain = type(owner)

    def weight(self: nn.Module) -> Tensor:
        parameter = self._parameters["weight"]
        if parameter is None:
            raise AttributeError("weight")
        return made(parameter)

    owner.__class__ = type(plain.__name__, (plain,), {"weight": property(weight)})


class _Weight:
    """The quantized weight, kept while the weight stays the same and nobody wants gradients."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self._kept: tuple[object, Tensor] | None = None

    def __call__(self, weight: Tensor) -> Tensor:
        if torch.is_grad_enabled() and weight.requires_grad:
            return self.quantizer(weight)
        state = fingerprint(weight)
        if self._kept is None or self._kept[0] != state:
            self._kept = (state, self.quantizer(weight.detach()))
        return self._kept[1]
