"""The hooks of a collector: what they read of a call, and that they are gone afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qgate.collecting.calls import Again, CollectedPlace, ModuleCall, tensors_in
from qgate.collecting.functions import AttentionFunctions, attention_weights, told_of
from qgate.collecting.graph import Edge, edges_of, inside_module_call, watch_gradients
from qgate.collecting.recorder import Recorder
from qgate.collecting.targets import ChosenModules, CollectedModule, layer_of
from qgate.dumps.records import Phase


@dataclass(frozen=True, eq=False)
class _Open:
    """A call that has begun and not returned."""

    spot: CollectedPlace
    call: ModuleCall | Again
    edges: dict[str, Edge]
    extra: dict[str, Any]
    weights: Callable[[], Tensor] | None = None


class Hooks:
    """Listens to the chosen modules and to attention functions, and tells the recorder."""

    def __init__(self, root: nn.Module, chosen: ChosenModules, recorder: Recorder) -> None:
        self._root, self._chosen, self._recorder = root, chosen, recorder
        self._wanted = recorder.wanted
        self._open: dict[int, list[_Open | None]] = {}
        self._handles: list[Any] = []
        self._on_graph: list[Any] = []
        self._whole = {t.spot.module for t in chosen.targets if t.spot.component == "FA"}
        self._layers: dict[str, int | None] = {}
        self._functions = AttentionFunctions(self._function_begins, self._function_returns)

    def install(self) -> None:
        for target in self._chosen.targets:
            wants_weights = target.spot.layer_type == "attention" and self._wanted.attention_weights
            if target.output or wants_weights:
                before = functools.partial(self._begins, target)
                after = functools.partial(self._returns, target)
                module = target.module
                self._handles += [
                    module.register_forward_pre_hook(before, with_kwargs=True),
                    module.register_forward_hook(after),
                ]
        self._functions.install()

    def remove(self) -> None:
        self._functions.remove()
        for handle in [*self._handles, *self._on_graph]:
            handle.remove()
        self._handles, self._on_graph = [], []
        self._open.clear()

    def next_iteration(self) -> None:
        """Gradients that have not come are not waited for any more."""
        for handle in self._on_graph:
            handle.remove()
        self._on_graph = []
        self._open.clear()

    # Modules -----------------------------------------------------------------------------------

    def _begins(
        self,
        target: CollectedModule,
        _module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if not torch.compiler.is_compiling():
            opened = self._guarded(target.spot, lambda: self._open_module(target, args, kwargs))
            self._open.setdefault(id(target), []).append(opened)

    def _returns(
        self, target: CollectedModule, _module: nn.Module, _args: Any, result: Any
    ) -> None:
        if torch.compiler.is_compiling():
            return
        waiting = self._open.get(id(target))
        opened = waiting.pop() if waiting else None
        if opened is not None:
            self._guarded(target.spot, lambda: self._close(opened, target.output, result))

    def _open_module(
        self, target: CollectedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Open | None:
        if not target.output:
            opened = self._opened(target.spot, {}, {})
            if opened is not None and isinstance(opened.call, ModuleCall):
                opened.call.watched = True  # nothing but its weights is kept
            return opened
        extra: dict[str, Any] = {"also": list(target.also)} if target.also else {}
        given = {
            name: found
            for name, parameter in target.inputs.items()
            if (found := _given(target, parameter, args, kwargs)) is not None
        }
        weight = _weight(target, kwargs) if target.weight else None
        if weight is not None:
            given["weight"] = weight
        return self._opened(target.spot, given, extra)

    # Functions ---------------------------------------------------------------------------------

    def _function_begins(
        self, function: str, tensors: dict[str, Tensor], arguments: dict[str, Any]
    ) -> Any:
        module = inside_module_call(self._chosen.names) or ""
        if module in self._whole or not self._chosen.takes_functions_in(module):
            return None
        spot = CollectedPlace(module, "attention", "FA", self._layer(module))

        def begin() -> _Open | None:
            return self._opened(
                spot,
                tensors,
                told_of(arguments),
                functools.partial(attention_weights, function, tensors, arguments),
            )

        return self._guarded(spot, begin)

    def _function_returns(self, opened: Any, result: Any) -> None:
        if isinstance(opened, _Open):
            self._guarded(opened.spot, lambda: self._close(opened, "context", result))

    def _layer(self, module: str) -> int | None:
        if module not in self._layers:
            path = self._chosen.paths.get(module, "")
            self._layers[module] = layer_of(self._root, path, module)
        return self._layers[module]

    # Both --------------------------------------------------------------------------------------

    def _opened(
        self,
        spot: CollectedPlace,
        given: Mapping[str, Tensor],
        extra: dict[str, Any],
        weights: Callable[[], Tensor] | None = None,
    ) -> _Open | None:
        call = self._recorder.begin(spot)
        if call is None:
            return None
        if isinstance(call, ModuleCall) and self._wanted.forward:
            for name, tensor in given.items():
                self._keep(call, "pre", name, tensor, extra)
        wants_gradients = self._wanted.backward and torch.is_grad_enabled()
        edges = edges_of(given) if wants_gradients else {}
        return _Open(spot, call, edges, extra, weights)

    def _close(self, opened: _Open, output: str, result: Any) -> None:
        returned = tensors_in(result)
        if not returned:
            raise TypeError(f"it returned {type(result).__name__} and no tensor")
        call = opened.call
        if isinstance(call, ModuleCall) and self._wanted.forward:
            if output:
                self._keep(call, "post", output, returned[0], opened.extra)
            if self._wanted.attention_weights and call.spot.layer_type == "attention":
                self._guarded(call.spot, lambda: self._keep_weights(opened, call, returned))
        if self._wanted.backward and output and torch.is_grad_enabled():
            self._await_gradients(opened, returned[0])

    def _keep(
        self, call: ModuleCall, phase: Phase, name: str, tensor: Tensor, extra: dict[str, Any]
    ) -> None:
        """One that cannot be read does not cost the others of its call."""
        keep = functools.partial(self._recorder.keep, call, "forward", phase, name, tensor, extra)
        self._guarded(call.spot, keep)

    def _keep_weights(self, opened: _Open, call: ModuleCall, returned: list[Tensor]) -> None:
        name, extra = "attention_weights", opened.extra
        if opened.weights is not None:
            weights = opened.weights()
            extra = {**extra, "computed_anew": True}
        elif len(returned) > 1 and returned[1].dim() > 2:
            weights = returned[1]
        else:
            return
        self._recorder.keep(call, "forward", "post", name, weights, extra)

    def _await_gradients(self, opened: _Open, output: Tensor) -> None:
        call, recorder = opened.call, self._recorder
        extra = {**opened.extra, "recomputed": True} if isinstance(call, Again) else opened.extra

        def arrived(name: str, gradient: Tensor) -> None:
            if not recorder.listening:
                return
            title = f"grad_{name or 'output'}"
            recorder.account.arrived(call, title)

            def keep() -> None:
                of = call.resolved() if isinstance(call, Again) else call
                if of is not None:
                    phase = "post" if name else "pre"
                    recorder.keep(of, "backward", phase, title, gradient, extra)  # type: ignore[arg-type]

            self._guarded(opened.spot, keep)

        handles, names = watch_gradients(output, opened.edges, arrived)
        if handles:
            self._on_graph += handles
            if isinstance(call, ModuleCall):
                call.watched = True
            recorder.account.expect(call, opened.spot, [f"grad_{n or 'output'}" for n in names])

    def _guarded(self, spot: CollectedPlace, work: Callable[[], Any]) -> Any:
        """A tensor that cannot be read is told of at the end; the model runs on."""
        try:
            return work()
        except Exception as error:
            self._recorder.account.failed(spot, error)
            return None


def _given(
    target: CollectedModule, parameter: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """The tensor of a call by its parameter; the first tensor there is without one."""
    if not parameter:
        order = [name for name in target.parameters if name in kwargs]
        found = tensors_in([*args, *(kwargs[name] for name in order), *kwargs.values()])
        return found[0] if found else None
    place = target.parameters.index(parameter)
    given = kwargs.get(parameter, args[place] if place < len(args) else None)
    return given if isinstance(given, Tensor) else None


def _weight(target: CollectedModule, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The weight of a call; the parameter behind one that is computed at each look."""
    module = target.module
    if isinstance(kwargs.get("weight"), Tensor):
        return kwargs["weight"]  # type: ignore[no-any-return]
    weight = module._parameters.get("weight", module.__dict__.get("weight"))
    if weight is None and hasattr(module, "parametrizations"):
        behind: Any = module.parametrizations
        weight = getattr(getattr(behind, "weight", None), "original", None)
    return weight if isinstance(weight, Tensor) else None
