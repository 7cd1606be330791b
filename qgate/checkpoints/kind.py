"""The kind of gate that is about a quantized checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.project.gate_kinds import GateKind, GateOptions, GateRun, named_after
from qgate.project.options import Option

if TYPE_CHECKING:
    from qgate.checkpoints import gate as gate
else:
    gate = LateModule("qgate.checkpoints.gate")

FILES = ("checkpoint", "parent", "recipe", "layout", "checkpoint-calibration")
"""Options that are paths or URLs: the checkpoint, and what it is held beside."""
OPTIONS = {
    "checkpoint": Option(
        "a quantized checkpoint; the suite on checkpoints needs it",
        None,
        "subject",
        "CHILD",
        Path,
    ),
    "parent": Option(
        "the checkpoint that --checkpoint was made from; without it no errors are measured",
        None,
        "subject",
        "PARENT",
        Path,
    ),
    "recipe": Option(
        "file with the intended recipe, if the checkpoint does not declare it",
        None,
        "subject",
        "FILE",
        Path,
    ),
    "layout": Option(
        "file with the layout of the checkpoint's weights, if it is your own",
        None,
        "subject",
        "FILE",
        Path,
    ),
    "checkpoint-calibration": Option(
        "collected activations, beside which static scales are held",
        None,
        "subject",
        "DUMP",
        Path,
    ),
    "checkpoint-name": Option(
        "name of the checkpoint in baselines (default: that of its folder)",
        None,
        "subject",
        "NAME",
    ),
}


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
    options = OPTIONS

    def check(self, options: GateOptions) -> None:
        for name in FILES[1:]:
            if name in options.typed and options.values["checkpoint"] is None:
                raise QgateError(
                    f"{options.spelled(name)} {options.typed[name]!r} is of a checkpoint: "
                    f"give {options.spelled('checkpoint')} CHILD, too."
                )
        for name in options.typed.keys() & set(FILES):
            options.readable(name)

    def record_name(self, options: GateOptions) -> str:
        values = options.values
        return str(values["checkpoint-name"] or named_after(values["checkpoint"]))

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
