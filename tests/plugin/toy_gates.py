"""A kind of gate in one file, as another package brings it: lengths beside accepted ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from qgate.baselines import Origin
from qgate.gate import Measured
from qgate.gate.sessions import GateSession, Outcome, gate
from qgate.gate.subjects import Subject, commit_here
from qgate.modes import Mode
from qgate.project.gate_kinds import GateKind, GateOptions, GateRun, named_after, register
from qgate.project.options import of_subject


@dataclass(frozen=True)
class LengthOptions:
    """The lengths, and their name."""

    lengths: str | None = of_subject("a file of lengths", "FILE", is_path=True)
    lengths_name: str | None = of_subject("name of the lengths in baselines", "NAME")


class Lengths(Subject):
    """Lengths of boards, by the name of the board."""

    def __init__(self, file: str, name: str, options: list[tuple[str, ...]]) -> None:
        self.file, self.name, self.options = file, name, options

    def origin(self) -> Origin:
        return Origin.of_subject("lengths", self.name, str(torch.__version__), commit_here())

    def layer_of(self, site: str) -> str:
        return site

    @cached_property
    def lengths(self) -> dict[str, float]:
        return dict(json.loads(Path(self.file).read_text()))


class LengthGates(GateSession):
    """Gates of lengths: each board is a layer."""

    subject: Lengths

    def layers(self, suite: str) -> list[str]:  # noqa: ARG002
        return list(self.subject.lengths)

    @gate
    def board(self, suite: str, board: str) -> Outcome:
        """Judge the length of a board."""
        value, order = self.subject.lengths[board], self.layers(suite).index(board)
        row = Measured(
            site=board,
            layer=board,
            scope="forward",
            values={"log2_amax": value},
            order=order,
            nonfinite=0,
            gated=("log2_amax",),
            why={"log2_amax": ""},
        )
        mode = Mode("boards", "the boards as they are")
        return self.judge(suite, mode, [row], board, label="lengths", whole=[board])


class LengthKind(GateKind):
    """Gates of the lengths in a file."""

    name = "lengths"
    fixture = "length_gate"
    doc = "Holds lengths against accepted ones."
    subject, plural, metavar = "lengths", "lengths", "FILE"
    cases = ("board", "A board of --lengths; the test runs once for each of --layers.")
    options = LengthOptions

    def check(self, options: GateOptions) -> None:
        if "lengths" in options.typed:
            options.readable("lengths")

    def record_name(self, options: GateOptions) -> str:
        own = options.of(LengthOptions)
        return own.lengths_name or f"lengths-{named_after(str(own.lengths))}"

    def open(self, run: GateRun, model: str) -> Any:  # noqa: ARG002
        file = run.options.readable("lengths")
        if file is None:
            return None
        name = self.record_name(run.options)
        session = run.session(
            LengthGates, Lengths(file, name, run.typed_again(*self.settings)), name
        )
        session.check_policy()
        return session


KIND = register(LengthKind())
