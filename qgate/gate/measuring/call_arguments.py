"""Arguments of modules with several inputs, as attention has, recorded and given again."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qgate.hooks.module_hooks import ModuleHooks
from qgate.models import Model, Site
from qgate.models.experts import makes_integers
from qgate.models.rows import map_tensors


@dataclass
class CallArguments:
    """Arguments of the first call of a module, given again to the module of another model."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)
    is_used: bool = False

    def give(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        """Return the arguments in the dtypes of a call's own, the first time."""
        if self.is_used or len(args) != len(self.args) or kwargs.keys() != self.kwargs.keys():
            return None
        self.is_used = True
        pairs = zip(self.args, args, strict=True)
        named = {name: _in_dtype_of(kwargs[name], value) for name, value in self.kwargs.items()}
        return tuple(_in_dtype_of(given, value) for value, given in pairs), named


def anew(value: Any) -> Any:
    """Copy an object that a call may change, as it does a cache; a module stays itself."""
    if value is None or isinstance(value, nn.Module | str | int | float):
        return value
    try:
        return copy.deepcopy(value)
    except (RuntimeError, TypeError):
        return value


def _in_dtype_of(given: Any, value: Any) -> Any:
    is_cast = isinstance(given, Tensor) and isinstance(value, Tensor)
    return value.to(given.dtype) if is_cast else value


def takes_several(model: Model, site: Site) -> bool:
    """Tell if a module reads more than its first input, as attention and norms with a gate do."""
    if site.kind != "norm":
        return site.kind == "attention"
    return len(inspect.signature(model.module.get_submodule(site.module).forward).parameters) > 1


def computed_tables(model: Model, modules: Collection[str]) -> list[str]:
    """List tables whose rows are chosen by code of the network, as a codebook's are."""
    tables = [
        name for name in modules if isinstance(model.module.get_submodule(name), nn.Embedding)
    ]
    return tables if tables and makes_integers(model.module) else []


def arguments_of(model: Model, modules: Collection[str], sample: Any) -> dict[str, CallArguments]:
    """Record the arguments of the first calls of modules in one pass of a sample."""
    recorded: dict[str, CallArguments] = {}

    def recorder(name: str) -> Callable[..., None]:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> None:
            if name not in recorded:
                recorded[name] = CallArguments(*map_tensors((args, kwargs), torch.clone, anew))

        return before

    with ModuleHooks() as hooks, torch.no_grad():
        for name in modules:
            hooks.add(model.module.get_submodule(name), recorder(name))
        if modules:
            model.outputs(sample)
    return recorded
