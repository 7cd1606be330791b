"""Needs of the suites: what a model has to have for its gates, and which of it a model lacks."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from qgate.activation_stats.plan import plan_of
from qgate.activation_stats.settings import ActivationSettings, with_values
from qgate.capture.next_tokens import predicts_next_tokens
from qgate.errors import QgateError
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.compared_sites import backward_sites
from qgate.gate.measuring.format_rows import format_sites
from qgate.gate.measuring.passes import shortened
from qgate.gate.measuring.tasks import NO_TASK

NO_LAYERS = "has no layers (qgate.Model(layers=…))"
GRAPH = "has none of its modules in mode {mode}: outputs alone are compared"
_NO_WEIGHTS = "has no linear layers and no convolutions"
_NO_ACTIVATIONS = "has no activations to measure"
NEEDY = ("task", "gradients", "scaling", "overflow")
"""Gates that not every model has something for."""


ANALYSES = with_values(ActivationSettings(), {
    "visualization.enabled.magnitude_input": True,
    "visualization.enabled.magnitude_output": True,
    "visualization.enabled.outlier_layer_wise": True,
    "smoothing.enabled": False,
    "formats": ["fp8_e4m3"],
})  # fmt: skip
"""Analyses that gates of activations are made from."""


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

    def lack(self, gate: str, layer: str = "", phase: str = "") -> Lack | None:
        """Say what a model lacks for a gate; None where it lacks nothing."""
        if gate == "task":
            return None if self._has_task else Lack(NO_TASK)
        if gate == "gradients" or (gate == "overflow" and phase == "backward"):
            return Lack(self._no_gradients) if self._no_gradients else None
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

    @cached_property
    def _has_task(self) -> bool:
        try:
            return self.bench.model.metric is not None or predicts_next_tokens(self.bench.model)
        except Exception:
            return True

    @cached_property
    def _layers_with_weights(self) -> frozenset[str]:
        bench = self.bench
        return frozenset(bench.layer_of(site.module) for site in format_sites(bench.model))

    @cached_property
    def _layers_with_activations(self) -> frozenset[str]:
        """List the layers that a run would measure activations in, without running the model."""
        model, layer_of = self.bench.model, self.bench.layer_of
        try:
            plan = plan_of(model.module, ANALYSES, model.part)
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
