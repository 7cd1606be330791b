"""The kind of gate that is about two engines on the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.project.gate_kinds import GateKind, GateOptions, GateRun, named_after
from qgate.project.options import of_subject

if TYPE_CHECKING:
    from qgate.engines import gate as gate
    from qgate.engines import run_gates as run_gates
    from qgate.engines import sync as sync
else:
    gate = LateModule("qgate.engines.gate")
    run_gates = LateModule("qgate.engines.run_gates")
    sync = LateModule("qgate.engines.sync")


@dataclass(frozen=True)
class EngineOptions:
    """The two engines, or the steps of a run."""

    engines: tuple[str, str] | None = of_subject(
        "scores of two engines on the same tokens; the suite on engines needs them",
        "A B",
        is_path=True,
    )
    engines_steps: str | None = of_subject(
        "a folder with the steps of a run, a trainer and a rollout engine in each", "DIR"
    )
    engines_name: str | None = of_subject(
        "name of the two engines in baselines (default: engines- and A's name)", "NAME"
    )
    engines_weights: tuple[str, str] | None = of_subject(
        "the checkpoints that the engines loaded, to compare their weights",
        "CKPT_A CKPT_B",
        is_path=True,
    )
    engines_logits: str | None = of_subject(
        "module of the dumps whose output are the logits (default: the last that may be it)",
        "MODULE",
    )


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
    options = EngineOptions

    def check(self, options: GateOptions) -> None:
        if "engines-steps" in options.typed:
            options.readable("engines-steps")
            for name in ("engines", "engines-weights"):
                if name in options.typed:
                    raise QgateError(
                        f"{options.spelled('engines-steps')} compares what is in its folder: "
                        f"leave {options.spelled(name)} out."
                    )
        if "engines-weights" in options.typed and options.of(EngineOptions).engines is None:
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
        own = options.of(EngineOptions)
        engine = own.engines_steps or (own.engines or ("",))[0]
        return own.engines_name or f"engines-{named_after(engine)}"

    def open(self, run: GateRun, model: str) -> gate.EngineGates | run_gates.RunGates | None:  # noqa: ARG002
        options, own = run.options, run.options.of(EngineOptions)
        if (steps := options.readable("engines-steps")) is not None:
            return self._open_run(run, [steps])
        engines = options.readable_pair("engines")
        if engines is None:
            return None
        if sync.is_sync(engines[1]):
            if own.engines_weights is not None:
                raise QgateError(
                    f"a folder of qgate.probe is compared as a whole and takes no "
                    f"{options.spelled('engines-weights')}: leave it out."
                )
            return self._open_run(run, engines)
        name, head = self.record_name(options), own.engines_logits or ""
        weights, typed = options.readable_pair("engines-weights"), run.typed_again(*self.settings)
        subject = gate.EngineSubject(*engines, name, weights, head, typed)
        session: gate.EngineGates = run.session(gate.EngineGates, subject, name)
        session.check_policy()
        session.check_accepted()
        run.note([f"engines: {note}" for note in session.notes()])
        return session

    def _open_run(self, run: GateRun, paths: Sequence[str]) -> run_gates.RunGates:
        """Open the gate of a sync, of two paths, or of the steps in a folder."""
        options, name = run.options, self.record_name(run.options)
        subject = name, paths, run.typed_again(*self.settings)
        head = options.of(EngineOptions).engines_logits or ""
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
