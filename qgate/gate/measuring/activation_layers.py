"""Layers of a model that have activations to gate, and the analyses that measure them."""

from __future__ import annotations

from qgate.activation_stats.plan import plan_of
from qgate.activation_stats.settings import ActivationSettings, with_values
from qgate.errors import QgateError
from qgate.gate.measuring.bench import Bench

ANALYSES = with_values(ActivationSettings(), {
    "visualization.enabled.magnitude_input": True,
    "visualization.enabled.magnitude_output": True,
    "visualization.enabled.outlier_layer_wise": True,
    "smoothing.enabled": False,
    "formats": ["fp8_e4m3"],
})  # fmt: skip


def layers_with_activations(bench: Bench) -> frozenset[str]:
    """Return the layers that a run would measure activations in, without running the model."""
    model = bench.model
    try:
        plan = plan_of(model.module, ANALYSES, model.part)
    except QgateError:
        return frozenset()
    return frozenset(bench.layer_of(name) for name, role in plan.requests if role != "weight")
