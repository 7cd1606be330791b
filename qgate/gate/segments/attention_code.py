"""The code of attention between its projections: a function of what these give in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from qgate.expected.operators import trace
from qgate.gate.measuring.call_arguments import CallArguments, arguments_of
from qgate.hooks.module_hooks import ModuleHooks
from qgate.models import Model
from qgate.models.rows import map_tensors
from qgate.modes.applying import in_dtype


class _Reached(Exception):
    """Ends a module where its last projection begins, with the tensor that this one gets."""


@dataclass(frozen=True)
class AttentionCode:
    """Scores, softmax and product of an attention module of the reference.

    sources  names of the projections that it reads, in the order in which they run
    result   name of the projection that reads what it makes
    """

    module: nn.Module
    sources: tuple[str, ...]
    result: str
    _stored: dict[torch.dtype, AttentionCode] = field(default_factory=dict, repr=False)

    def stored_in(self, dtype: torch.dtype) -> AttentionCode:
        """Return the code with its weights in another dtype."""
        if dtype not in self._stored:
            module = in_dtype(self.module, dtype)
            self._stored[dtype] = replace(self, module=module, _stored={})
        return self._stored[dtype]

    def called(self, arguments: CallArguments) -> AttentionCall:
        """Return the code with the arguments of one call of the module."""
        return AttentionCall(self, arguments)


@dataclass(frozen=True)
class AttentionCall:
    """A function of what the projections give, and of the tensors that the module is called with.

    The projections themselves do not run.
    """

    code: AttentionCode
    arguments: CallArguments

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Return the tensors of the call, in the order in which the function takes them."""
        tensors: list[Tensor] = []
        values = self.arguments.args, self.arguments.kwargs
        map_tensors(values, tensors.append)  # type: ignore[arg-type]
        return tensors

    def __call__(self, *tensors: Tensor) -> Tensor:
        code, count = self.code, len(self.code.sources)
        remaining = iter(tensors[count:])
        values = self.arguments.args, self.arguments.kwargs
        args, kwargs = map_tensors(values, lambda _: next(remaining))
        projected = dict(zip(code.sources, tensors[:count], strict=True))
        with _instead_of_projections(code.module, projected, code.result):
            try:
                code.module(*args, **kwargs)
            except _Reached as reached:
                tensor: Tensor = reached.args[0]
                return tensor
        raise RuntimeError(f"the attention did not call {code.result}.")


@contextmanager
def _instead_of_projections(
    module: nn.Module, projected: Mapping[str, Tensor], result: str
) -> Iterator[None]:
    def end(x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        raise _Reached(x)

    def returning(tensor: Tensor) -> Callable[..., Tensor]:
        return lambda *_args, **_kwargs: tensor

    forwards = {name: returning(tensor) for name, tensor in projected.items()} | {result: end}
    owners = {name: vars(module.get_submodule(name)) for name in forwards}
    before = {name: owner["forward"] for name, owner in owners.items() if "forward" in owner}
    try:
        for name, owner in owners.items():
            owner["forward"] = forwards[name]
        yield
    finally:
        for name, owner in owners.items():
            del owner["forward"]
            owner |= {"forward": before[name]} if name in before else {}


def find_attention(model: Model, sample: Any) -> dict[str, AttentionCode]:
    """Return the attention of a model by the name of its module, as far as projections enclose it.

    Other projections than those it reads run after it: the first of them reads its result.
    """
    leaves: dict[str, list[str]] = {}
    for site in model.sites():
        if site.kind == "linear" and site.port == "output":
            owner, _, leaf = site.module.rpartition(".")
            leaves.setdefault(owner, []).append(leaf)
    names = [owner for owner, listed in leaves.items() if owner and len(listed) > 1]
    calls = arguments_of(model, names, sample)
    codes: dict[str, AttentionCode] = {}
    for name in names:
        if name in calls:
            module, arguments = model.module.get_submodule(name), calls[name]
            code = _find(module, leaves[name], arguments)
            codes |= {} if code is None else {name: code}
    return codes


@torch.no_grad()
def _find(
    module: nn.Module, leaves: Sequence[str], arguments: CallArguments
) -> AttentionCode | None:
    outputs: dict[str, Tensor] = {}

    def keep(leaf: str, _module: nn.Module, _args: tuple[Any, ...], result: Tensor) -> None:
        outputs[leaf] = result

    with ModuleHooks() as hooks:
        for leaf in leaves:
            hooks.add(module.get_submodule(leaf), None, functools.partial(keep, leaf))
        module(*arguments.args, **arguments.kwargs)
    order = list(outputs)
    for count in range(1, len(order)):
        code = AttentionCode(module, tuple(order[:count]), order[count])
        call = code.called(arguments)
        if trace(call, [*list(outputs.values())[:count], *call.tensors]).has_attention:
            return code
    return None
