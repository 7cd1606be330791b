"""The kind of gate that is about two engines on the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.project.gate_kinds import GateKind, GateOptions, GateRun, named_after
from qgate.project.options import Option, PathPair

if TYPE_CHECKING:
    from qgate.engines import gate as gate
else:
    gate = LateModule("qgate.engines.gate")

OPTIONS = {
    "engines": Option(
        "scores of two engines on the same tokens; the suite on engines needs them",
        None,
        "subject",
        "A B",
        PathPair,
    ),
    "engines-name": Option(
        "name of the two engines in baselines (default: engines- and A's name)",
        None,
        "subject",
        "NAME",
    ),
    "engines-weights": Option(
        "the checkpoints that the engines loaded, to compare their weights",
        None,
        "subject",
        "CKPT_A CKPT_B",
        PathPair,
    ),
    "engines-logits": Option(
        "module of the dumps whose output are the logits (default: the last that may be it)",
        None,
        "subject",
        "MODULE",
    ),
}


class EngineKind(GateKind):
    """Gates of two engines: the probabilities of tokens, the weights, and the modules."""

    name = "engines"
    fixture = "engine_gate"
    doc = "Holds two engines on the same tokens against limits and their accepted record."
    subject, plural, metavar = "engines", "engines", "A B"
    cases = (
        "engine_part",
        "A part of --engines that there is something to compare for: tokens, weights, or sites.",
    )
    has_layers = False
    options = OPTIONS

    def check(self, options: GateOptions) -> None:
        if "engines-weights" in options.typed and options.values["engines"] is None:
            raise QgateError(
                f"{options.spelled('engines-weights')} are those of engines: give "
                f"{options.spelled('engines')} A B, too."
            )
        if "engines" in options.typed:
            options.readable_pair("engines")

    def record_name(self, options: GateOptions) -> str:
        """Name the accepted record of two engines: apart from a checkpoint or a dump of A."""
        values = options.values
        return str(values["engines-name"] or f"engines-{named_after(values['engines'][0])}")

    def open(self, run: GateRun, model: str) -> gate.EngineGates | None:  # noqa: ARG002
        options = run.options
        engines = options.readable_pair("engines")
        if engines is None:
            return None
        name, head = self.record_name(options), options.values["engines-logits"] or ""
        weights, typed = options.readable_pair("engines-weights"), run.typed_again(*self.options)
        subject = gate.EngineSubject(*engines, name, weights, head, typed)
        session: gate.EngineGates = run.session(gate.EngineGates, subject, name)
        session.check_policy()
        session.check_accepted()
        run.note([f"engines: {note}" for note in session.notes()])
        return session


KIND = EngineKind()
