"""Apply a mode: build a model that computes as the mode says, beside the original."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.hooks import ModuleHooks
from qgate.hooks.tapping import tap_sites
from qgate.interruptions import raise_interruption, raised_by_users
from qgate.loading import LateModule
from qgate.models.blocks import sharing_copy, whole_copy
from qgate.models.fingerprints import WeightCache
from qgate.models.rows import map_tensors
from qgate.models.sites import Site, like
from qgate.modes.mode import Mode
from qgate.modes.plan import Plan
from qgate.modes.resolving import make_plan
from qgate.modes.simulated.mixer import casts_of
from qgate.modes.simulated.planning import simulate

if TYPE_CHECKING:
    from qgate.formats.quantizer import Quantizer
    from qgate.models.model import Model
    from qgate.modes.attention import planning as planning
    from qgate.modes.calibration import Calibration
    from qgate.modes.states import planning as states_planning
else:
    planning = LateModule("qgate.modes.attention.planning")
    states_planning = LateModule("qgate.modes.states.planning")


@dataclass(frozen=True)
class Quantized:
    """A model in a mode, with its plan and the static scales of a calibrated mode."""

    model: Model
    mode: Mode
    plan: Plan
    scales: Calibration | None = None

    def casts(self) -> dict[str, dict[str, int]]:
        """Count per integer cast: values, saturated ones, and those that were not finite."""
        return {name: cast.counts() for name, cast in casts_of(self.model.module).items()}


def apply(mode: Mode, model: Model, calibration: Calibration | None = None) -> Quantized:
    """Return the model in that mode; the original stays as it is.

    Modes of rules share the parameters of the model in their basis, so that gradients arrive at the
    parameters of the reference; a dtype or an own kernel needs a copy.
    """
    if calibration is not None and mode.calibrated and calibration.weights != model.weights_hash():
        raise QgateError(
            f"the calibration was made with other weights ({calibration.model}, "
            f"{calibration.weights[:12]}) than those of {model.name} now "
            f"({model.weights_hash()[:12]}): calibrate again."
        )
    plan = make_plan(mode, model, calibration)
    if mode.own:
        return Quantized(_build_own(mode, model), mode, plan, calibration)
    base = model.in_basis(mode.basis)
    if mode.dtype is not None:
        dtype = getattr(torch, mode.dtype)
        module = in_dtype(base.module, dtype)
        ModuleHooks().add(module, _cast_floats(dtype))
        return Quantized(base.with_module(module), mode, plan, calibration)
    module = sharing_copy(base.module)
    if mode.choices is not None and calibration is not None:
        simulate(module, mode.choices, calibration)
    elif mode.attention is not None:
        ranges = {} if calibration is None else calibration.ranges()
        planning.cache_attentions(base, module, mode.attention, ranges)
    elif mode.states is not None:
        states_planning.store_states(base, module, mode.states)
    else:
        _install(module, base.sites(), plan.quantizers())
    return Quantized(base.with_module(module), mode, plan, calibration)


def _cast_floats(dtype: torch.dtype) -> Callable[..., Any]:
    """Return a hook that casts floating-point arguments of a module to the dtype of its weights."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        return map_tensors(args, cast), map_tensors(kwargs, cast)

    return hook


def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a module with its stored weights in another dtype.

    Computed buffers, such as the frequencies of rotary positions, stay as they are, and so do
    weights that a Hugging Face model keeps in float32.
    """
    copied = whole_copy(module)
    with torch.no_grad():
        for name, tensor in copied.state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and not stays_in_float32(copied, name, dtype):
                tensor.data = tensor.data.to(dtype)
    return copied


def stays_in_float32(module: nn.Module, name: str, dtype: torch.dtype) -> bool:
    """Tell if a Hugging Face model declares that a part or a tensor of it stays in float32.

    Transformers keeps some in float16 alone, as bfloat16 has the range of float32.
    """
    names = [*(getattr(module, "_keep_in_fp32_modules_strict", None) or ())]
    if dtype == torch.float16:
        names += getattr(module, "_keep_in_fp32_modules", None) or ()
    return any(f".{part}." in f".{name}." for part in names)


def _build_own(mode: Mode, model: Model) -> Model:
    """Build the model by its own callable, which must not change the original."""
    before = model.weights_hash()
    try:
        module = model.modes[mode.name](model)
    except QgateError:
        raise
    except raised_by_users() as error:
        raise_interruption()
        raise QgateError(
            f"mode {mode.name!r} of {model.name} cannot be built: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
    if not isinstance(module, nn.Module):
        raise QgateError(
            f"mode {mode.name!r} of {model.name} returned {type(module).__name__}; its callable "
            "takes the Model and returns a torch.nn.Module."
        )
    if module is model.module or _weights_now(model) != before:
        raise QgateError(
            f"mode {mode.name!r} of {model.name} changed the model in place, so that no reference "
            "remains to compare it with: let it work on copy.deepcopy(model.module)."
        )
    sites = [site for site in model.sites() if _has_site(module, site)]
    built = replace(model.with_module(module), _sites=())
    try:
        sites = sites if _passes_any(built, sites) else []
    except QgateError as error:
        raise QgateError(f"in mode {mode.name!r} {error}") from error
    blocks = {site.module for site in sites if site.is_block}
    applied = replace(built, _sites=tuple(sites))
    # Without layers a model would look for them in the compiled or exported one.
    applied.layers = tuple(name for name in model.layers if name in blocks)
    return applied


def _passes_any(model: Model, sites: list[Site]) -> bool:
    """Tell if any site is passed: a compiled graph calls no module, though it has them."""
    passed: list[Site] = []

    def take(site: Site, _tensor: Tensor) -> None:
        passed.append(site)

    with torch.no_grad(), tap_sites(model.module, sites, take, lenient=True):
        model.outputs(model.inputs[0])
    return bool(passed)


def _has_site(module: nn.Module, site: Site) -> bool:
    """Tell if a module has a site of the reference; graphs and packed weights may have none."""
    try:
        owner = module.get_submodule(site.module)
    except AttributeError:
        return False
    if type(owner) is nn.Module or _is_compiled(module, site.module):
        # A holder of parameters, which nothing calls; or a part of compiled code, which calls the
        # hooks that were there when it was compiled, and no others.
        return False
    weight = getattr(owner, "weight", None)
    is_plain = type(weight) in (Tensor, nn.Parameter)
    return site.port != "weight" or (is_plain and bool(weight.is_floating_point()))  # type: ignore[union-attr]


def _is_compiled(root: nn.Module, name: str) -> bool:
    """Tell if a module is inside code that torch.compile compiled."""
    module = root
    for part in name.split("."):
        if "_orig_mod" in module._modules or hasattr(module.forward, "_torchdynamo_orig_callable"):
            return True
        if module._compiled_call_impl is not None:
            return True
        module = getattr(module, part)
    return False


def _weights_now(model: Model) -> str:
    try:
        return model.weights_hash()
    except (NotImplementedError, RuntimeError):
        return "weights that are not plain tensors any more"


def _install(module: nn.Module, sites: list[Site], quantizers: dict[str, Quantizer]) -> None:
    """Install quantizers: hooks for activations, properties for weights."""
    flowing: list[Site] = []
    for site in sites:
        quantizer = quantizers.get(site.name)
        if quantizer is None:
            continue
        if site.port == "weight":
            _quantize_weight(module.get_submodule(site.module), quantizer)
        else:
            flowing.append(site)
    silent, heard = {site.name for site in flowing}, set[str]()

    def take(site: Site, tensor: Tensor) -> Tensor:
        silent.discard(site.name)
        heard.add(like(site.name))
        return quantizers[site.name](tensor)

    tap_sites(module, flowing, take)

    def check(_module: nn.Module, _args: Any, _result: Any) -> None:
        # A router may send nothing to an expert.
        if lost := sorted(name for name in silent if like(name) not in heard):
            first = lost[0]
            raise QgateError(
                f"{len(lost)} quantizers of this mode got no tensor, {first} among them: the "
                "forward pass does not call these modules."
            )

    ModuleHooks().add(module, after=check)


def _quantize_weight(owner: nn.Module, quantizer: Quantizer) -> None:
    """Let `owner.weight` read quantized; the parameter itself does not change."""
    quantized_weight = WeightCache(quantizer)
    plain = type(owner)

    def weight(self: nn.Module) -> Tensor:
        parameter = self._parameters["weight"]
        if parameter is None:
            raise AttributeError("weight")
        return quantized_weight(parameter)

    owner.__class__ = type(plain.__name__, (plain,), {"weight": property(weight)})
