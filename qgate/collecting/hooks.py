"""Hooks of a collector on modules, attention functions and the autograd graph."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qgate.collecting.calls import CollectedSite, ModuleCall, RepeatedCall, tensors_in
from qgate.collecting.functions import (
    AttentionFunctions,
    ScriptFunctions,
    attention_weights,
    details_of,
)
from qgate.collecting.graph import Edge, edges_of, inside_module_call, watch_gradients
from qgate.collecting.recorder import Recorder
from qgate.collecting.targets import ChosenModules, CollectedModule, layer_of
from qgate.dumps.record import Phase
from qgate.hooks import ModuleHooks


@dataclass(frozen=True, eq=False)
class _OpenCall:
    """A call that has not returned yet."""

    site: CollectedSite
    call: ModuleCall | RepeatedCall
    edges: dict[str, Edge]
    extra: dict[str, object]
    weights: Callable[[], Tensor] | None = None


class CollectorHooks:
    """Hands tensors of chosen modules and attention functions to the recorder."""

    def __init__(self, root: nn.Module, chosen: ChosenModules, recorder: Recorder) -> None:
        self._root, self._chosen, self._recorder = root, chosen, recorder
        self._settings = recorder.settings
        self._guard = recorder.progress.guard
        self._open: dict[tuple[int, int], list[_OpenCall | None]] = {}
        self._on_modules, self._on_graph = ModuleHooks(copied=False), ModuleHooks()
        self._whole = {t.site.module for t in chosen.targets if t.site.component == "FA"}
        self._layers: dict[str, int | None] = {}
        self._functions = AttentionFunctions(
            functools.partial(self._guard, self._on_function_begin),
            functools.partial(self._guard, self._on_function_return),
        )
        self._scripts = ScriptFunctions(self._without_hooks)

    def install(self) -> None:
        for target in self._chosen.targets:
            wants_weights = (
                target.site.layer_type == "attention" and self._settings.attention_weights
            )
            if target.output or wants_weights:
                self._on_modules.add(
                    target.module,
                    functools.partial(self._guard, self._on_begin, target),
                    functools.partial(self._guard, self._on_return, target),
                )
        self._functions.install()
        self._scripts.install()

    def remove(self) -> None:
        self._scripts.remove()
        self._functions.remove()
        self._on_modules.remove()
        self.next_iteration()

    def next_iteration(self) -> None:
        """Stop waiting for gradients of the last iteration."""
        self._on_graph.remove()
        self._open.clear()

    @contextlib.contextmanager
    def _without_hooks(self) -> Iterator[None]:
        with self._on_modules.hidden(), self._recorder.progress.hidden():
            yield

    # Modules -----------------------------------------------------------------------------------

    def _on_begin(
        self,
        target: CollectedModule,
        _module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, object],
    ) -> None:
        open_call = self._guarded(target.site, lambda: self._open_module(target, args, kwargs))
        self._open.setdefault((threading.get_ident(), id(target)), []).append(open_call)

    def _on_return(
        self, target: CollectedModule, _module: nn.Module, _args: Any, result: Any
    ) -> None:
        open_calls = self._open.get((threading.get_ident(), id(target)))
        open_call = open_calls.pop() if open_calls else None
        if open_call is not None:
            self._guarded(target.site, lambda: self._close(open_call, target.output, result))

    def _open_module(
        self, target: CollectedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _OpenCall | None:
        if not target.output:
            open_call = self._open_site(target.site, {}, {})
            if open_call is not None and isinstance(open_call.call, ModuleCall):
                open_call.call.has_gradients = True  # only its weights are kept
            return open_call
        inputs = {
            name: _input(target, parameter, args, kwargs)
            for name, parameter in target.inputs.items()
        }
        if target.weight:
            inputs["weight"] = _weight(target.module, kwargs)
        tensors = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        return self._open_site(
            target.site, tensors, {"also": [*target.also]} if target.also else {}
        )

    # Functions ---------------------------------------------------------------------------------

    def _on_function_begin(
        self, function: str, tensors: dict[str, Tensor], arguments: dict[str, object]
    ) -> Any:
        module = inside_module_call(self._chosen.names) or ""
        if module in self._whole or not self._chosen.takes_functions_in(module):
            return None
        if module not in self._layers:
            path = self._chosen.paths.get(module, "")
            self._layers[module] = layer_of(self._root, path, module)
        site = CollectedSite(module, "attention", "FA", self._layers[module])
        weights = functools.partial(attention_weights, function, tensors, arguments)
        extra = details_of(arguments)
        return self._guarded(site, lambda: self._open_site(site, tensors, extra, weights))

    def _on_function_return(self, open_call: Any, result: Any) -> None:
        if isinstance(open_call, _OpenCall):
            self._guarded(open_call.site, lambda: self._close(open_call, "context", result))

    # Both --------------------------------------------------------------------------------------

    def _open_site(
        self,
        site: CollectedSite,
        tensors: Mapping[str, Tensor],
        extra: dict[str, object],
        weights: Callable[[], Tensor] | None = None,
    ) -> _OpenCall | None:
        call = self._recorder.begin(site)
        if call is None:
            return None
        if isinstance(call, ModuleCall) and self._settings.forward:
            for name, tensor in tensors.items():
                self._keep(call, "pre", name, tensor, extra)
        wants_gradients = self._settings.backward and torch.is_grad_enabled()
        edges = edges_of(tensors) if wants_gradients else {}
        return _OpenCall(site, call, edges, extra, weights)

    def _close(self, open_call: _OpenCall, output: str, result: Any) -> None:
        outputs = tensors_in(result)
        if not outputs:
            raise TypeError(f"it returned {type(result).__name__} and no tensor")
        call = open_call.call
        if isinstance(call, ModuleCall) and self._settings.forward:
            if output:
                self._keep(call, "post", output, outputs[0], open_call.extra)
            if self._settings.attention_weights and call.site.layer_type == "attention":
                self._guarded(call.site, lambda: self._keep_weights(open_call, call, outputs))
        if self._settings.backward and output and torch.is_grad_enabled():
            self._await_gradients(open_call, outputs[0])

    def _keep(
        self, call: ModuleCall, phase: Phase, name: str, tensor: Tensor, extra: dict[str, object]
    ) -> None:
        """Keep one tensor; an unreadable one does not lose the others of its call."""
        keep = functools.partial(self._recorder.keep, call, "forward", phase, name, tensor, extra)
        self._guarded(call.site, keep)

    def _keep_weights(self, open_call: _OpenCall, call: ModuleCall, outputs: list[Tensor]) -> None:
        extra = open_call.extra
        if open_call.weights is not None:
            weights = open_call.weights()
            extra = {**extra, "computed_anew": True}
        elif len(outputs) > 1 and outputs[1].dim() > 2:
            weights = outputs[1]
        else:
            return
        self._recorder.keep(call, "forward", "post", "attention_weights", weights, extra)

    def _await_gradients(self, open_call: _OpenCall, output: Tensor) -> None:
        call, recorder = open_call.call, self._recorder
        is_repeated = isinstance(call, RepeatedCall)
        extra = {**open_call.extra, "recomputed": True} if is_repeated else open_call.extra

        def arrived(name: str, gradient: Tensor) -> None:
            if not recorder.listening:
                return
            title, phase = f"grad_{name or 'output'}", "post" if name else "pre"
            recorder.account.expected.pop((call, title), None)

            def keep() -> None:
                owner = call.resolved() if isinstance(call, RepeatedCall) else call
                if owner is not None:
                    recorder.keep(owner, "backward", phase, title, gradient, extra)  # type: ignore[arg-type]

            self._guarded(open_call.site, keep)

        arrival = functools.partial(self._guard, arrived)
        handles, names = watch_gradients(output, open_call.edges, arrival)
        if handles:
            self._on_graph.keep(*handles)
            if isinstance(call, ModuleCall):
                call.has_gradients = True
            for name in names:
                recorder.account.expected[call, f"grad_{name or 'output'}"] = open_call.site

    def _guarded(self, site: CollectedSite, work: Callable[[], Any]) -> Any:
        """Do work on a tensor; an error is reported at the end, and the model runs on."""
        try:
            return work()
        except Exception as error:
            self._recorder.account.add_failure(site, error)
            return None


def _input(
    target: CollectedModule, parameter: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return the tensor of a parameter; without a parameter, the first tensor of a call."""
    if not parameter:
        order = [name for name in target.parameters if name in kwargs]
        tensors = tensors_in([*args, *(kwargs[name] for name in order), *kwargs.values()])
        return tensors[0] if tensors else None
    index = target.parameters.index(parameter)
    argument = kwargs.get(parameter, args[index] if index < len(args) else None)
    return argument if isinstance(argument, Tensor) else None


def _weight(module: nn.Module, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the weight of a call; for a parametrized weight, the parameter behind it."""
    if isinstance(kwargs.get("weight"), Tensor):
        return kwargs["weight"]  # type: ignore[no-any-return]
    weight = module._parameters.get("weight", module.__dict__.get("weight"))
    if weight is None and hasattr(module, "parametrizations"):
        parametrizations: Any = module.parametrizations
        weight = getattr(getattr(parametrizations, "weight", None), "original", None)
    return weight if isinstance(weight, Tensor) else None
