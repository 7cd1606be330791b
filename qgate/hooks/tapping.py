"""Hooks that hand over the tensors at the sites of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import MethodType
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from qgate.errors import QgateError
from qgate.hooks.module_hooks import ModuleHooks


class ModulePort(Protocol):
    """A port of a module, as a site of a model is one."""

    @property
    def module(self) -> str: ...

    @property
    def port(self) -> str: ...


P = TypeVar("P", bound=ModulePort)


def tap_sites(
    root: nn.Module,
    sites: Iterable[P],
    take: Callable[[P, Tensor], Tensor | None],
    *,
    first: bool = False,
    lenient: bool = False,
) -> ModuleHooks:
    """Call `take(site, tensor)` whenever a site is passed, until the hooks are removed.

    A tensor that it returns replaces the one at the site. Weights are taken when their module runs,
    and cannot be replaced. A later tap gets the tensors that earlier ones returned, unless it is
    `first`. A site that is passed without a tensor is an error, unless the tap is `lenient`.
    """
    by_module: dict[str, list[P]] = {}
    for site in sites:
        by_module.setdefault(site.module, []).append(site)
    hooks = ModuleHooks()
    for name, ports in by_module.items():
        try:
            module = root.get_submodule(name)
        except AttributeError as error:
            hooks.remove()
            raise QgateError(f"site {ports[0]} is not in this model any more: {error}.") from None
        before = [site for site in ports if site.port not in ("output", "state")]
        after = [site for site in ports if site.port in ("output", "state")]
        parameters = _parameters(module.forward) if before else []
        hooks.add(
            module,
            _before(before, take, parameters, lenient) if before else None,
            _after(after, take, lenient) if after else None,
            first=first,
        )
    return hooks


def _parameters(forward: Callable[..., Any]) -> list[str]:
    function = getattr(forward, "__func__", None)
    return list(inspect.signature(forward).parameters) if function is None else _names_of(function)


@lru_cache(maxsize=256)
def _names_of(function: Callable[..., Any]) -> list[str]:
    """List the arguments of a method; a class has one for all of its modules."""
    return list(inspect.signature(MethodType(function, object())).parameters)


def _before(
    sites: list[P],
    take: Callable[[P, Tensor], Tensor | None],
    parameters: list[str],
    lenient: bool,
) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        values: list[Any] = list(args)
        for site in sites:
            if site.port == "weight":
                take(site, getattr(module, "weight"))  # noqa: B009
                continue
            key = _locate(site, parameters, values, kwargs)
            if key is None and lenient:
                continue
            if key is None:
                raise QgateError(
                    f"site {site} was passed without a tensor: {site.module} was called with none."
                )
            holder: Any = kwargs if isinstance(key, str) else values
            tensor = _tensor_in(holder[key])
            assert tensor is not None
            replaced = take(site, tensor)
            if replaced is not None:
                holder[key] = _exchanged(holder[key], tensor, replaced)
        return tuple(values), kwargs

    return hook


def _locate(
    site: ModulePort, parameters: list[str], args: list[Any], kwargs: dict[str, object]
) -> str | int | None:
    """Return the position or keyword of a site's tensor in a call; None where there is none."""
    if site.port == "input":
        position = next((k for k, value in enumerate(args) if _holds_tensor(value)), None)
        if position is not None:
            return position
        order = [*(name for name in parameters if name in kwargs), *kwargs]
        keyword = next((k for k in order if _holds_tensor(kwargs[k])), None)
        if keyword is not None:
            return keyword
    elif site.port in kwargs:
        return site.port
    elif site.port in parameters and parameters.index(site.port) < len(args):
        return parameters.index(site.port)
    return None


def _after(
    sites: list[P], take: Callable[[P, Tensor], Tensor | None], lenient: bool
) -> Callable[..., Any]:
    def hook(_module: nn.Module, _args: Any, result: Any) -> Any:
        for site in sites:
            if site.port == "state":
                replaced = take(site, result.state)
                result = result if replaced is None else result._replace(state=replaced)
                continue
            tensor = _tensor_in(result)
            tensor = _first(result) if tensor is None else tensor
            if tensor is None and lenient:
                continue
            if tensor is None:
                raise QgateError(
                    f"site {site} was passed without a tensor: it returned {type(result).__name__}."
                )
            replaced = take(site, tensor)
            if replaced is not None:
                result = _with_first(result, tensor, replaced)
        return result

    return hook


def _first(result: Any) -> Tensor | None:
    """Return the first tensor of a result itself, where `_with_first` can replace it."""
    values = result.values() if isinstance(result, dict) else result
    if isinstance(values, Iterable):
        for value in values:
            if _holds_tensor(value):
                return _tensor_in(value)
    return None


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | PackedSequence)


def _tensor_in(value: Any) -> Tensor | None:
    """Return a tensor, or the tokens of packed texts; None for another value."""
    if isinstance(value, PackedSequence):
        return value.data
    return value if isinstance(value, Tensor) else None


def _exchanged(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return the new tensor in place of the old one, packed as that was."""
    if isinstance(value, PackedSequence):
        return value._replace(data=new) if value.data is old else value
    return new if value is old else value


def _with_first(result: Any, old: Tensor, new: Tensor) -> Any:
    if _holds_tensor(result):
        return _exchanged(result, old, new)
    if isinstance(result, dict):
        return type(result)({k: _exchanged(value, old, new) for k, value in result.items()})
    values = [_exchanged(value, old, new) for value in result]
    return type(result)(*values) if hasattr(result, "_fields") else type(result)(values)
