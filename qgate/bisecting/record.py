"""Records of a bisection: the run of each commit, and what all of them say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

RunVerdict = Literal["red", "green", "skipped"]


class CommitName(NamedTuple):
    """A commit: its hash and its subject."""

    commit: str
    subject: str

    @property
    def short(self) -> str:
        return self.commit[:12]


class CommitCause(NamedTuple):
    """The first cause of a run among the gates that a bisection is about."""

    text: str
    site: str
    model: str
    mode: str


@dataclass(frozen=True)
class CommitRun:
    """The gates of one commit, each red, green, or new if it has no accepted values.

    reason   why the commit has no verdict at all, else empty
    causes   the causes of its failures, the likeliest first, each with its gates
    """

    name: CommitName
    gates: Mapping[str, str] = field(default_factory=dict)
    causes: Sequence[tuple[CommitCause, frozenset[str]]] = ()
    reason: str = ""

    @property
    def red(self) -> frozenset[str]:
        return frozenset(gate for gate, state in self.gates.items() if state == "red")

    def cause(self, gates: frozenset[str]) -> CommitCause | None:
        """Return the first cause that some of these gates fail for."""
        return next((cause for cause, of in self.causes if of & gates), None)

    def verdict(self, gates: frozenset[str]) -> RunVerdict:
        """Judge the commit by these gates: one that holds none of them has no verdict."""
        if self.reason:
            return "skipped"
        if self.red & gates:
            return "red"
        return "green" if any(self.gates.get(gate) == "green" for gate in gates) else "skipped"

    def why(self, gates: frozenset[str]) -> str:
        """Say why the commit was skipped."""
        if self.reason:
            return self.reason
        new = sum(self.gates.get(gate) == "new" for gate in gates)
        if new:
            return f"{new} of the red gates have no accepted values, and it holds no other of them"
        return "it holds none of the red gates"


@dataclass(frozen=True)
class Bisection:
    """The end of a search: every run in the order of history, and the first red commit.

    gates      those that are red at the last commit
    first      the run of the first red commit; None where the ends do not differ
    unknown    commits before it that have no verdict, any of which may be the first
    problem    why the search has no answer, else empty
    """

    runs: tuple[CommitRun, ...]
    gates: frozenset[str]
    first: CommitRun | None = None
    unknown: tuple[CommitName, ...] = ()
    problem: str = ""
