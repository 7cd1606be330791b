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
        "also check that batches, caches, splits and processes do not change results, in all ways",
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
    """Gates of what must be the same twice, in a few ways; in all where an option asks for them."""

    name = "relations"
    fixture = "relation_gate"
    doc = "Holds a model in a mode against itself, computed in other ways; needs no baseline."
    options = OPTIONS
    whole_by = ("relations", "bitwise")
    follows = "across-weights"

    def open(self, run: GateRun, model: str) -> gate.RelationGates:
        bench, options = run.bench(model), run.options.values
        session: gate.RelationGates
        session = run.session(
            gate.RelationGates, bench, bench.model.name,
            bitwise=options["bitwise"], is_deep=options["relations"] or options["bitwise"],
        )  # fmt: skip
        return session


KIND = RelationKind()
