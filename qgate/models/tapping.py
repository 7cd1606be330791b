"""Hooks that hand over what flows at the sites of a model, and leave no trace afterwards."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qgate.errors import QgateError
from qgate.models.sites import Site

Take = Callable[[Site, Tensor], "Tensor | None"]


@contextlib.contextmanager
def tapped(
    root: nn.Module, sites: Iterable[Site], take: Take, *, first: bool = False
) -> Iterator[None]:
    """While the context is open, `take(site, tensor)` is called whenever a site is passed.

    What it returns, if it is a tensor, takes the place of what flowed. Weights do not flow: they
    are taken when their module runs, and cannot be replaced.
    """
    handles = tap(root, sites, take, first=first)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tap(
    root: nn.Module, sites: Iterable[Site], take: Take, *, first: bool = False
) -> list[RemovableHandle]:
    """The same for good, until the handles are removed.

    Later taps see what earlier ones left, unless they ask to be `first`.
    """
    by_module: dict[str, list[Site]] = {}
    for site in sites:
        by_module.setdefault(site.module, []).append(site)
    handles = []
    for name, ports in by_module.items():
        try:
            module = root.get_submodule(name)
        except AttributeError as error:
            raise QgateError(f"site {ports[0]} is not in this model any more: {error}.") from None
        before = [site for site in ports if site.port not in ("output", "state")]
        after = [site for site in ports if site.port in ("output", "state")]
        if before:
            hook = _before(before, take, list(inspect.signature(module.forward).parameters))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first))
        if after:
            handles.append(module.register_forward_hook(_after(after, take)))
    return handles


def _before(sites: list[Site], take: Take, parameters: list[str]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: list[Any] = list(args)
        for site in sites:
            if site.port == "weight":
                take(site, getattr(module, "weight"))  # noqa: B009
                continue
            where = _place(site, parameters, given, kwargs)
            holder: Any = kwargs if isinstance(where, str) else given
            replaced = take(site, holder[where])
            if replaced is not None:
                holder[where] = replaced
        return tuple(given), kwargs

    return hook


def _place(site: Site, parameters: list[str], args: list[Any], kwargs: dict[str, Any]) -> str | int:
    """Where a call has the tensor of a site: a position or a keyword."""
    if site.port == "input":
        found = next((k for k, value in enumerate(args) if isinstance(value, Tensor)), None)
        if found is not None:
            return found
        order = [*(name for name in parameters if name in kwargs), *kwargs]
        named = next((k for k in order if isinstance(kwargs[k], Tensor)), None)
        if named is not None:
            return named
    elif site.port in kwargs:
        return site.port
    elif site.port in parameters and parameters.index(site.port) < len(args):
        return parameters.index(site.port)
    raise QgateError(
        f"site {site} was passed without a tensor: {site.module} was called with none."
    )


def _after(sites: list[Site], take: Take) -> Callable[..., Any]:
    def hook(_module: nn.Module, _args: Any, result: Any) -> Any:
        for site in sites:
            if site.port == "state":
                replaced = take(site, result.state)
                result = result if replaced is None else result._replace(state=replaced)
                continue
            tensor = result if isinstance(result, Tensor) else _first(result, site)
            replaced = take(site, tensor)
            if replaced is not None:
                result = _with_first(result, tensor, replaced)
        return result

    return hook


def _first(result: Any, site: Site) -> Tensor:
    values = result.values() if isinstance(result, dict) else result
    if isinstance(values, Iterable):
        for value in values:
            if isinstance(value, Tensor):
                return value
    raise QgateError(
        f"site {site} was passed without a tensor: it returned {type(result).__name__}."
    )


def _with_first(result: Any, old: Tensor, new: Tensor) -> Any:
    if isinstance(result, Tensor):
        return new
    if isinstance(result, dict):
        return type(result)({k: new if value is old else value for k, value in result.items()})
    values = [new if value is old else value for value in result]
    return type(result)(*values) if hasattr(result, "_fields") else type(result)(values)
