"""The kind of gate that is about a model's activations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from qgate.loading import LateModule
from qgate.project.gate_kinds import GateKind, GateRun

if TYPE_CHECKING:
    from qgate.activation_stats import gate as gate
else:
    gate = LateModule("qgate.activation_stats.gate")


class ActivationKind(GateKind):
    """Gates of how large a model's activations are, and where their outliers."""

    name = "activations"
    fixture = "activation_gate"
    doc = "Holds the activations of a model against their accepted record; fails with what to do."

    def open(self, run: GateRun, model: str) -> gate.ActivationGates:
        bench = run.bench(model)
        session: gate.ActivationGates = run.session(gate.ActivationGates, bench, bench.model.name)
        return session

    def gates_needed(self, called: Collection[str]) -> Sequence[str]:  # noqa: ARG002
        return ["activations"]


KIND = ActivationKind()
