"""Needs of the suites: what a model has to have for its gates, and which of it a model lacks."""

from __future__ import annotations

import contextlib
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.compared_sites import backward_sites
from qgate.gate.measuring.passes import shortened
from qgate.hooks import ModuleHooks
from qgate.hooks.nested import first_float_tensor
from qgate.loading import LateModule
from qgate.models import Model

if TYPE_CHECKING:
    from qgate.activation_stats import plan as activation_plan
    from qgate.activation_stats import settings as activation_settings
    from qgate.capture import next_tokens as next_tokens
    from qgate.gate.measuring import format_rows as format_rows
    from qgate.gate.measuring import tasks as tasks
else:
    activation_plan = LateModule("qgate.activation_stats.plan")
    activation_settings = LateModule("qgate.activation_stats.settings")
    format_rows = LateModule("qgate.gate.measuring.format_rows")
    tasks = LateModule("qgate.gate.measuring.tasks")
    next_tokens = LateModule("qgate.capture.next_tokens")


NO_LAYERS = "has no layers (qgate.Model(layers=…))"
GRAPH = "has none of its modules in mode {mode}: outputs alone are compared"
INFERENCE = (
    "has no backward pass in mode {mode} (its kernels are for inference; a torch.autograd.Function "
    "gives them one)"
)
_NO_WEIGHTS = "has no linear layers and no convolutions"
_NO_ACTIVATIONS = "has no activations to measure"


class Lack(NamedTuple):
    """Words for what a model lacks, said of its name; `layer` where only that one lacks it."""

    words: str
    layer: str = ""


class SuiteNeeds:
    """Needs of the gates of one model; each question is answered once.

    What fails here lacks nothing: the test itself says the error.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._graphs: dict[str, bool] = {}
        self._for_inference: dict[str, bool] = {}

    def lack(self, gate: str, layer: str = "", phase: str = "", mode: str = "") -> Lack | None:
        """Say what a model lacks for a gate, in a mode of its own; None where it lacks nothing."""
        if gate == "task":
            return None if self._has_task else Lack(tasks.NO_TASK)
        if gate == "gradients" or (gate == "overflow" and phase == "backward"):
            if self._no_gradients:
                return Lack(self._no_gradients)
            is_inference = gate == "gradients" and mode and self._is_for_inference(mode)
            return Lack(INFERENCE.format(mode=mode), layer) if is_inference else None
        if not layer:
            return None
        if gate == "activations" and layer not in self._layers_with_activations:
            return Lack(_NO_ACTIVATIONS, layer)
        if gate in ("scaling", "overflow") and layer not in self._layers_with_weights:
            return Lack(_NO_WEIGHTS, layer)
        return None

    def is_graph(self, name: str) -> bool:
        """Tell if a mode of the model's own is a graph that calls none of its modules."""
        if name not in self._graphs:
            try:
                mode = self.bench.mode(name)
                self._graphs[name] = mode.own and not self.bench.quantized(mode).model.layers
            except Exception:
                self._graphs[name] = False
        return self._graphs[name]

    def _is_for_inference(self, name: str) -> bool:
        """Tell if no kernel of a mode of the model's own hands a gradient back to its input."""
        if name not in self._for_inference:
            try:
                mode = self.bench.mode(name)
                self._for_inference[name] = mode.own and not _has_backward(
                    self.bench.quantized(mode).model, self.bench.model
                )
            except Exception:
                self._for_inference[name] = False
        return self._for_inference[name]

    @cached_property
    def _has_task(self) -> bool:
        try:
            model = self.bench.model
            return model.metric is not None or next_tokens.predicts_next_tokens(model)
        except Exception:
            return True

    @cached_property
    def _layers_with_weights(self) -> frozenset[str]:
        bench = self.bench
        return frozenset(
            bench.layer_of(site.module) for site in format_rows.format_sites(bench.model)
        )

    @cached_property
    def _layers_with_activations(self) -> frozenset[str]:
        """List the layers that a run would measure activations in, without running the model."""
        model, layer_of = self.bench.model, self.bench.layer_of
        try:
            analyses = activation_settings.GATED
            plan = activation_plan.plan_of(model.module, analyses, model.part)
        except QgateError:
            return frozenset()
        return frozenset(layer_of(name) for name, role in plan.requests if role != "weight")

    @cached_property
    def _no_gradients(self) -> str:
        """Say why a backward pass has no gradients; empty where it has."""
        model = self.bench.model
        weights = [s for s in backward_sites(model, is_forced=False) if s.port == "weight"]
        for site in weights:
            weight = getattr(model.module.get_submodule(site.module), "weight", None)
            if isinstance(weight, Tensor) and not weight.requires_grad:
                return f"has no gradient at {site}, which takes none (requires_grad_(True))"
        try:
            with torch.enable_grad():
                takes_gradient = model(shortened(model.inputs[0])).requires_grad
        except Exception:
            return ""
        return "" if takes_gradient else "has no gradients: its output depends on no parameter"


def _has_backward(model: Model, base: Model) -> bool:
    """Tell if any product that a mode replaced, or any at all, hands a gradient to its input."""
    with_backward: set[str] = set()

    def enter(args: tuple[Any, ...]) -> tuple[Any, ...]:
        # Each product alone: the one before it may have no backward.
        return tuple(x.detach().requires_grad_(True) if _is_float(x) else x for x in args)

    def leave(name: str, _module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        output, leaves = first_float_tensor(result), [x for x in args if _is_float(x)]
        if output is not None and output.requires_grad and leaves:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                gradients = torch.autograd.grad(output.sum(), leaves, allow_unused=True)
                with_backward.update([name] if gradients[0] is not None else [])

    kernels = dict(model.module.named_modules())
    products = {site.module for site in base.sites() if site.is_product} & kernels.keys()
    modules = dict(base.module.named_modules())
    replaced = {name for name in products if type(kernels[name]) is not type(modules[name])}
    with ModuleHooks() as hooks, torch.enable_grad():
        for name in replaced or products:
            hooks.add(kernels[name], lambda _m, args, kwargs: (enter(args), kwargs))
            hooks.add(kernels[name], None, partial(leave, name))
        model(shortened(model.inputs[0]))
    return bool(with_backward) or not products


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
