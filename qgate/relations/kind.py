"""The kind of gate that compares a model with itself, computed in other ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qgate.loading import LateModule
from qgate.project.gate_kinds import GateKind, GateRun
from qgate.project.options import Option

if TYPE_CHECKING:
    from qgate.relations import gate as gate
else:
    gate = LateModule("qgate.relations.gate")

OPTIONS = {
    "relations": Option(
        "also check that batches, caches and splits do not change results (the suite of relations)",
        False,
        kind=bool,
    ),
    "bitwise": Option(
        "with relations: results must have the same bits, not only agree to float noise",
        False,
        kind=bool,
    ),
}


class RelationKind(GateKind):
    """Gates of what must be the same twice, which run where an option asks for them.

    They compare a mode with itself, which no accepted error depends on, and take seconds per mode.
    """

    name = "relations"
    fixture = "relation_gate"
    doc = "Holds a model in a mode against itself, computed in other ways; needs no baseline."
    options = OPTIONS
    follows = "across-weights"
    asked_by = ("relations", "bitwise")

    def open(self, run: GateRun, model: str) -> gate.RelationGates:
        bench, bitwise = run.bench(model), run.options.values["bitwise"]
        session: gate.RelationGates
        session = run.session(gate.RelationGates, bench, bench.model.name, bitwise=bitwise)
        return session


KIND = RelationKind()
