"""The kind of gate that compares a model with itself, computed in other ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qgate.loading import LateModule
from qgate.project.gate_kinds import GateKind, GateRun
from qgate.settings import setting

if TYPE_CHECKING:
    from qgate.relations import gate as gate
else:
    gate = LateModule("qgate.relations.gate")


@dataclass(frozen=True)
class RelationOptions:
    """Extent of the comparison, and how exact it is."""

    relations: bool = setting(
        False,
        "also check that batches, caches, splits and processes do not change results, in all ways",
    )
    bitwise: bool = setting(
        False, "with relations: results must have the same bits, not only agree to float noise"
    )


class RelationKind(GateKind):
    """Gates of what must be the same twice, in a few ways; in all where an option asks for them."""

    name = "relations"
    fixture = "relation_gate"
    doc = "Holds a model in a mode against itself, computed in other ways; needs no baseline."
    options = RelationOptions
    whole_by = ("relations", "bitwise")
    follows = "across-weights"

    def open(self, run: GateRun, model: str) -> gate.RelationGates:
        bench, own = run.bench(model), run.options.of(RelationOptions)
        session: gate.RelationGates
        session = run.session(
            gate.RelationGates, bench, bench.model.name,
            bitwise=own.bitwise, is_deep=own.relations or own.bitwise,
        )  # fmt: skip
        return session


KIND = RelationKind()
