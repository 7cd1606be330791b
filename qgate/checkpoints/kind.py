"""The kind of gate that is about a quantized checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.project.gate_kinds import GateKind, GateOptions, GateRun, named_after
from qgate.project.options import of_subject

if TYPE_CHECKING:
    from qgate.checkpoints import gate as gate
else:
    gate = LateModule("qgate.checkpoints.gate")

FILES = ("checkpoint", "parent", "recipe", "layout", "checkpoint-calibration")
"""Options that are paths or URLs: the checkpoint, and what it is held beside."""


@dataclass(frozen=True)
class CheckpointOptions:
    """The checkpoint, and what it is held beside."""

    checkpoint: str | None = of_subject(
        "a quantized checkpoint; the suite on checkpoints needs it", "CHILD", is_path=True
    )
    parent: str | None = of_subject(
        "the checkpoint that --checkpoint was made from; without it no errors are measured",
        "PARENT",
        is_path=True,
    )
    recipe: str | None = of_subject(
        "file with the intended recipe, if the checkpoint does not declare it", "FILE", is_path=True
    )
    layout: str | None = of_subject(
        "file with the layout of the checkpoint's weights, if it is your own", "FILE", is_path=True
    )
    checkpoint_calibration: str | None = of_subject(
        "collected activations, beside which static scales are held", "DUMP", is_path=True
    )
    checkpoint_name: str | None = of_subject(
        "name of the checkpoint in baselines (default: that of its folder)", "NAME"
    )


class CheckpointKind(GateKind):
    """Gates of a checkpoint: its weights beside its parent's, its tensors, and its recipe."""

    name = "checkpoint"
    fixture = "checkpoint_gate"
    doc = "Holds a quantized checkpoint against its recipe, its parent and its accepted record."
    subject, plural, metavar = "checkpoint", "checkpoints", "CHILD"
    cases = (
        "checkpoint_layer",
        "A layer of the checkpoint of --checkpoint; the test runs once for each of --layers.",
    )
    options = CheckpointOptions

    def check(self, options: GateOptions) -> None:
        for name in FILES[1:]:
            if name in options.typed and options.of(CheckpointOptions).checkpoint is None:
                raise QgateError(
                    f"{options.spelled(name)} {options.typed[name]!r} is of a checkpoint: "
                    f"give {options.spelled('checkpoint')} CHILD, too."
                )
        for name in options.typed.keys() & set(FILES):
            options.readable(name)

    def record_name(self, options: GateOptions) -> str:
        own = options.of(CheckpointOptions)
        return own.checkpoint_name or named_after(str(own.checkpoint))

    def open(self, run: GateRun, model: str) -> gate.CheckpointGates | None:  # noqa: ARG002
        options = run.options
        child = options.readable("checkpoint")
        if child is None:
            return None
        parent, recipe, layout, calibration = map(options.readable, FILES[1:])
        name = self.record_name(options)
        typed = run.typed_again(*FILES, "checkpoint-name")
        subject = gate.CheckpointSubject(child, parent, name, typed, recipe, layout, calibration)
        session: gate.CheckpointGates = run.session(gate.CheckpointGates, subject, name)
        session.check_policy()
        session.check_parent()
        return session


KIND = CheckpointKind()
