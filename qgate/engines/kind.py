"""The kind of gate that is about two engines on the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.project.gate_kinds import GateKind, GateOptions, GateRun, named_after
from qgate.project.options import Option, PathPair

if TYPE_CHECKING:
    from qgate.engines import gate as gate
    from qgate.engines import run_gates as run_gates
    from qgate.engines import sync as sync
else:
    gate = LateModule("qgate.engines.gate")
    run_gates = LateModule("qgate.engines.run_gates")
    sync = LateModule("qgate.engines.sync")

OPTIONS = {
    "engines": Option(
        "scores of two engines on the same tokens; the suite on engines needs them",
        None,
        "subject",
        "A B",
        PathPair,
    ),
    "engines-steps": Option(
        "a folder with the steps of a run, a trainer and a rollout engine in each",
        None,
        "subject",
        "DIR",
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
        "A part of --engines that there is something to compare for: tokens, weights, or sites; "
        "of a probe sync, of --engines-steps steps.",
    )
    has_layers = False
    options = OPTIONS

    def check(self, options: GateOptions) -> None:
        if "engines-steps" in options.typed:
            options.readable("engines-steps")
            for name in ("engines", "engines-weights"):
                if name in options.typed:
                    raise QgateError(
                        f"{options.spelled('engines-steps')} compares what is in its folder: "
                        f"leave {options.spelled(name)} out."
                    )
        if "engines-weights" in options.typed and options.values["engines"] is None:
            raise QgateError(
                f"{options.spelled('engines-weights')} are those of engines: give "
                f"{options.spelled('engines')} A B, too."
            )
        if "engines" in options.typed:
            options.readable_pair("engines")

    def subject_given(self, values: Mapping[str, Any]) -> Any:
        return values["engines-steps"] or values["engines"]

    def record_name(self, options: GateOptions) -> str:
        """Name the accepted record of two engines: apart from a checkpoint or a dump of A."""
        values = options.values
        engine = values["engines-steps"] or values["engines"][0]
        return str(values["engines-name"] or f"engines-{named_after(engine)}")

    def open(self, run: GateRun, model: str) -> gate.EngineGates | run_gates.RunGates | None:  # noqa: ARG002
        options = run.options
        if (steps := options.readable("engines-steps")) is not None:
            return self._open_run(run, [steps])
        engines = options.readable_pair("engines")
        if engines is None:
            return None
        if sync.is_sync(engines[1]):
            if options.values["engines-weights"] is not None:
                raise QgateError(
                    f"a folder of qgate.probe is compared as a whole and takes no "
                    f"{options.spelled('engines-weights')}: leave it out."
                )
            return self._open_run(run, engines)
        name, head = self.record_name(options), options.values["engines-logits"] or ""
        weights, typed = options.readable_pair("engines-weights"), run.typed_again(*self.options)
        subject = gate.EngineSubject(*engines, name, weights, head, typed)
        session: gate.EngineGates = run.session(gate.EngineGates, subject, name)
        session.check_policy()
        session.check_accepted()
        run.note([f"engines: {note}" for note in session.notes()])
        return session

    def _open_run(self, run: GateRun, paths: Sequence[str]) -> run_gates.RunGates:
        """Open the gate of a sync, of two paths, or of the steps in a folder."""
        options, name = run.options, self.record_name(run.options)
        subject = name, paths, run.typed_again(*self.options)
        head = options.values["engines-logits"] or ""
        run_subject = (
            run_gates.StepsSubject(*subject, head=head)
            if len(paths) == 1
            else run_gates.SyncSubject(*subject)
        )
        run_subject.check()
        session: run_gates.RunGates = run.session(
            run_gates.RunGates, run_subject, name, note=run.note
        )
        session.check_policy()
        return session


KIND = EngineKind()
