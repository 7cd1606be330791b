"""Mixers whose states a mode can quantize: those of qgate's Mamba-1, and of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.hooks import ModuleHooks
from qgate.models.blocks import sharing_copy
from qgate.models.mamba.network import MambaMixer
from qgate.models.recurrent.mixers import (
    MIXERS,
    MixerKind,
    is_reached,
    keeps_unknown_state,
    kind_of,
    reach,
)
from qgate.text import listed

if TYPE_CHECKING:
    from qgate.models.model import Model

_FITTING = (
    "These modes are for tiny-mamba, Mamba-1 loaded by mamba:PATH, and of transformers for "
    f"{', '.join(MIXERS)}."
)
Take = Callable[["StateMixer", str, "StateInputs"], None]


@dataclass(frozen=True)
class StateInputs:
    """Inputs of a module that keeps a state, by name.

    tokens     with a value for each token, (batch, tokens, …)
    constants  the same for all of them, such as weights
    """

    tokens: Mapping[str, Tensor]
    constants: Mapping[str, Any]

    def changed(self, change: Callable[[Tensor], Tensor]) -> StateInputs:
        """Return other tokens with the same constants."""
        return StateInputs({name: change(x) for name, x in self.tokens.items()}, self.constants)

    def to(self, module: Callable[..., Any], **more: Any) -> Any:
        """Call a module with them."""
        return module(**self.tokens, **self.constants, **more)


@dataclass(frozen=True)
class StateMixer:
    """A mixer with the modules that keep its states, by side: "conv" and "ssm".

    leaves   their names in the mixer
    readers  sites that read first what they return
    """

    at: str
    module: nn.Module
    leaves: Mapping[str, str]
    readers: Mapping[str, str]

    def name(self, side: str) -> str:
        return f"{self.at}.{self.leaves[side]}"

    def site(self, side: str) -> str:
        """Return the name of the place where a state is stored."""
        return f"{self.name(side)}:stored_state"

    def part(self, side: str) -> Any:
        """Return the module that keeps a state."""
        return self.module.get_submodule(self.leaves[side])

    def inputs(self, side: str, args: tuple[Tensor, ...], named: Mapping[str, Any]) -> StateInputs:
        """Return what a module that keeps a state was given; a cache is left out."""
        ports = self.part(side).ports
        arguments = {**dict(zip(ports, args, strict=False)), **named}
        constants = {name: x for name, x in arguments.items() if name not in (*ports, "cache")}
        return StateInputs({port: arguments[port] for port in ports}, constants)


def network_of(model: Model) -> nn.Module:
    """Return the network of a model, or a copy of it that has the states in reach."""
    network = model.module
    return network if all(map(is_reached, _mixers(network).values())) else reached(network)


def reached(network: nn.Module, *, in_place: bool = False) -> nn.Module:
    """Return a network around the same parameters whose mixers let their states be stored."""
    network = network if in_place else sharing_copy(network)
    for mixer in _mixers(network).values():
        if not is_reached(mixer):
            reach(mixer)
    return network


def _mixers(network: nn.Module) -> dict[str, nn.Module]:
    """List the mixers of transformers by name."""
    return {name: module for name, module in network.named_modules() if kind_of(module)}


def named_mixers(model: Model, network: nn.Module | None = None) -> list[StateMixer]:
    """List the mixers of a model, in a network that has their states in reach."""
    network = network_of(model) if network is None else network
    unknown = {type(m).__name__ for m in network.modules() if keeps_unknown_state(m)}
    if unknown:
        raise QgateError(
            f"{model.name} has states that these modes cannot reach, of "
            f"{listed(sorted(unknown), 4)}. {_FITTING} Choose another mode."
        )
    mixers = [
        _own(name, module) if isinstance(module, MambaMixer) else _of(name, module, kind)
        for name, module in network.named_modules()
        if (kind := kind_of(module)) or isinstance(module, MambaMixer)
    ]
    if not mixers:
        raise QgateError(
            f"{model.name} has no recurrent state that can be quantized. {_FITTING} Choose another "
            "mode."
        )
    return mixers


def _own(at: str, module: nn.Module) -> StateMixer:
    leaves = {"conv": "conv1d", "ssm": "scan"}
    return StateMixer(at, module, leaves, {s: f"{at}.{leaf}:output" for s, leaf in leaves.items()})


def _of(at: str, module: nn.Module, kind: MixerKind | None) -> StateMixer:
    assert kind is not None
    leaves = {"conv": "short_conv", "ssm": "scan"} if kind.scan else {"conv": "short_conv"}
    children = {name for name, _ in module.named_children()}
    # Falcon-H1 has a norm that it calls only where its configuration says so.
    children -= set() if getattr(module, "mamba_rms_norm", True) else {"norm"}
    readers = {
        side: next(f"{at}.{child}:input" for child in kind.before[side] if child in children)
        for side in leaves
    }
    return StateMixer(at, module, leaves, readers)


def watch(hooks: ModuleHooks, mixers: list[StateMixer], take: Take) -> None:
    """Call `take(mixer, side, inputs)` with each call of a module that keeps a state."""
    for mixer in mixers:
        for side in mixer.leaves:

            def before(
                _module: nn.Module,
                args: tuple[Tensor, ...],
                named: Mapping[str, Any],
                mixer: StateMixer = mixer,
                side: str = side,
            ) -> None:
                take(mixer, side, mixer.inputs(side, args, named))

            hooks.add(mixer.part(side), before)


@torch.no_grad()
def given_to(model: Model, sample: Tensor) -> dict[str, StateInputs]:
    """Run a model and return what was given to the modules that keep a state, by their names."""
    network, by_name = network_of(model), dict[str, StateInputs]()

    def take(mixer: StateMixer, side: str, inputs: StateInputs) -> None:
        by_name.setdefault(mixer.name(side), inputs)

    with ModuleHooks() as hooks:
        watch(hooks, named_mixers(model, network), take)
        model.with_module(network)(sample)
    return by_name
