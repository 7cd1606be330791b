"""The kind of gate that is about a dump."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qgate.loading import LateModule
from qgate.project.gate_kinds import GateKind, GateOptions, GateRun, plain_name
from qgate.project.options import of_subject

if TYPE_CHECKING:
    from qgate.dumps import gate as gate
    from qgate.storage import foreign as foreign
    from qgate.storage.locations import Location
else:
    foreign = LateModule("qgate.storage.foreign")
    gate = LateModule("qgate.dumps.gate")

_NOTES = 6


@dataclass(frozen=True)
class DumpOptions:
    """The dump, and its name."""

    dump: str | None = of_subject(
        "a dump: tensors collected from a run; the suites on dumps need it", "DIR", is_path=True
    )
    dump_name: str | None = of_subject(
        "name of the dump in baselines (default: dump- and its model)", "NAME"
    )


class DumpKind(GateKind):
    """Gates of a dump: what formats lose of its tensors, and where their values lie."""

    name = "dump"
    fixture = "dump_gate"
    doc = "Holds a folder of dumps against limits and its accepted record; fails with what to do."
    subject, plural, metavar = "dump", "dumps", "DIR"
    cases = (
        "dump_layer",
        "A layer of the dump of --dump; the test runs once for each of --layers.",
    )
    options = DumpOptions
    by_format = ("dump_overflow",)

    def check(self, options: GateOptions) -> None:
        if "dump" in options.typed:
            options.location("dump")

    def record_name(self, options: GateOptions) -> str:
        """Name the accepted record of a dump: apart from a model, which may be called the same."""
        return _record_name(options, options.directory / str(options.of(DumpOptions).dump))

    def open(self, run: GateRun, model: str) -> gate.DumpGates | None:  # noqa: ARG002
        options = run.options
        folder = options.location("dump")
        if folder is None:
            return None
        name, ((_, text),) = _record_name(options, folder), run.typed_again("dump")
        subject = gate.DumpSubject(folder, name, text, options.of(DumpOptions).dump_name or "")
        session: gate.DumpGates = run.session(gate.DumpGates, subject, name)
        session.check_policy()
        notes = subject.notes()
        more = [f"and {len(notes) - _NOTES} more notes"] if len(notes) > _NOTES else []
        run.note([f"dump {text}: {note}" for note in [*notes[:_NOTES], *more]])
        return session


def _record_name(options: GateOptions, folder: Location) -> str:
    if (name := options.of(DumpOptions).dump_name) is not None:
        return name
    try:
        model = json.loads(foreign.read_foreign(folder / "dump.json", "dumps"))["header"]["model"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        model = None
    return f"dump-{plain_name(model if isinstance(model, str) else folder.resolve().name)}"


KIND = DumpKind()
