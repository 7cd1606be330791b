"""The kind of gate that is about a model in its modes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from qgate.loading import LateModule
from qgate.project.gate_kinds import GateKind, GateRun

if TYPE_CHECKING:
    from qgate.gate.measuring import model_gates as model_gates
else:
    model_gates = LateModule("qgate.gate.measuring.model_gates")

NEEDY = ("task", "gradients", "scaling", "overflow")
"""Gates that not every model has something for."""


class ModelKind(GateKind):
    """Gates of a model: its layers, outputs, gradients, formats, task, reference and canary."""

    name = "models"
    fixture = "gate"
    doc = "Holds what was measured against limits and accepted errors; fails with what to do."
    runs_alone = False
    by_format = ("overflow", "scaling")

    def open(self, run: GateRun, model: str) -> model_gates.ModelGates:
        bench = run.new_bench(model)
        session: model_gates.ModelGates
        session = run.session(model_gates.ModelGates, bench, bench.model.name)
        session.check_policy()
        return session

    def gates_needed(self, called: Collection[str]) -> Sequence[str]:
        return [name for name in NEEDY if name in called]


KIND = ModelKind()
