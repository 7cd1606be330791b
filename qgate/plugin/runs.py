"""The state of a run: what it left out, and what its tests reported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qgate.plugin.gate_collection import gates_of
from qgate.plugin.settings import RunOptions

if TYPE_CHECKING:
    from qgate.baselines.update import StoredChange
    from qgate.gate.sessions import GateSession
    from qgate.page.runs import Run
    from qgate.results.coverage import ModeScope, RunExtent
    from qgate.results.movements import Movement
    from qgate.results.run_facts import AcrossWeights, LooserLimit, ModePower, TaskSummary
    from qgate.results.schema import Record
    from qgate.sweeps.underflow import Watch


Part = dict[str, Any]


@dataclass(eq=False)
class Selection:
    """The tests that a run left out, with reasons; `empty` if no others were selected.

    layers   what --layers selects, by test function and model
    unasked  what the command does not ask for, in a word or two each, with the sentence on how to
    """

    refused: list[str] = field(default_factory=list)
    unfit: dict[tuple[str, str], str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    empty: bool = False
    layers: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    unasked: dict[str, str] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """All sentences on what was left out."""
        return [*self.unasked.values(), *self.notes]

    def refuse(self, reason: object) -> None:
        text = f"qgate: {reason}"
        if text not in self.refused:
            self.refused.append(text)


@dataclass(eq=False)
class RunFacts:
    """Facts of a run: by model, by model and mode, and of the machine; `run` has the last."""

    models: dict[str, dict[str, str]] = field(default_factory=dict)
    plans: dict[str, dict[str, str]] = field(default_factory=dict)
    limits: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    run: dict[str, str | int | None] = field(default_factory=dict)
    scopes: dict[str, ModeScope] = field(default_factory=dict)
    power: list[ModePower] = field(default_factory=list)
    tasks: list[TaskSummary] = field(default_factory=list)
    across_weights: list[AcrossWeights] = field(default_factory=list)


@dataclass(eq=False)
class SuiteRun:
    """A run as it is reported; of a test that is run again the last time counts.

    others     tests that are no gates: node → outcome; `lines` has the first of those that failed
    records    what the gates of a test found, by node; attempts how often it was run again
    following  reports of failures that follow from those of other tests
    unlisted   reports of failures that pytest counts and does not list
    broken     tests whose set-up failed: node → first line
    called     gates whose test was called
    skips      gates that were skipped or expected to fail: node → cause and reason
    extent     how many gates were held, and which were not
    errors     what could not be written
    crashed    workers that went down
    parts      what each process knows
    changes    what an update wrote, or would write; stale what it left out of date
    header     how the run ended, and which other tests failed
    accepted   accepted errors that an update wrote, or would write
    idle       there were gates, and none of them compared anything
    underflow  what --watch-underflow saw
    page_run   the run as its page reads it, once it is written
    receipt    the file that `qgate run` asks for, with the exit status once all is settled
    """

    options: RunOptions
    selection: Selection = field(default_factory=Selection)
    others: dict[str, str] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    gates: set[str] = field(default_factory=set)
    records: dict[str, list[Record]] = field(default_factory=dict)
    following: list[Any] = field(default_factory=list)
    unlisted: list[Any] = field(default_factory=list)
    attempts: dict[str, int] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    skips: dict[str, tuple[str, str]] = field(default_factory=dict)
    extent: RunExtent | None = None
    errors: list[str] = field(default_factory=list)
    crashed: set[str] = field(default_factory=set)
    parts: list[Part] = field(default_factory=list)
    changes: list[StoredChange] = field(default_factory=list)
    accepted: list[Movement] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    underflow: list[str] = field(default_factory=list)
    header: Record = field(default_factory=dict)
    updated: bool = False
    idle: bool = False
    folder: Path | None = None
    written: bool = False
    page: Path | None = None
    writer: Any = None
    page_run: Run | None = None
    receipt: Path | None = None

    @property
    def rows(self) -> list[dict[str, object]]:
        """The records of all gates."""
        return [row for rows in self.records.values() for row in rows]

    @property
    def has_news(self) -> bool:
        """Return True if qgate has anything to report; most runs of pytest are of other tests."""
        gates = self.records or self.broken or self.header or self.idle
        left_out = self.selection.refused or self.selection.texts or self.extent
        return bool(gates or left_out or self.errors or self.underflow)


# Of this process: sessions by what they are of and its name, what it left out, what keeps its
# update from being written, and what it watched.
SESSIONS: pytest.StashKey[dict[tuple[str, str], GateSession]] = pytest.StashKey()
_SELECTION: pytest.StashKey[Selection] = pytest.StashKey()
_CONFLICTS: pytest.StashKey[list[str]] = pytest.StashKey()
_LOOSER: pytest.StashKey[list[LooserLimit]] = pytest.StashKey()
WATCH: pytest.StashKey[Watch] = pytest.StashKey()


def selection_of(config: pytest.Config) -> Selection:
    return config.stash.setdefault(_SELECTION, Selection())


def conflicts_of(config: pytest.Config) -> list[str]:
    return config.stash.setdefault(_CONFLICTS, [])


def note_looser(config: pytest.Config, limits: Iterable[LooserLimit]) -> None:
    """Note the limits of a gate that are looser than the default, each once."""
    noted = looser_of(config)
    noted += [limit for limit in limits if limit not in noted]


def looser_of(config: pytest.Config) -> list[LooserLimit]:
    return config.stash.setdefault(_LOOSER, [])


def sessions_used(config: pytest.Config) -> list[GateSession]:
    """Return the sessions that measured anything, or held anything against a baseline."""
    held = config.stash.setdefault(SESSIONS, {}).values()
    return [session for session in held if session.ledger.is_used]


def part_of(config: pytest.Config) -> Part:
    """Return what this process knows of a run, as plain data, before anything was measured.

    Under pytest-xdist it travels to the controller: only the process that talks to the user writes.
    """
    selection, watch = selection_of(config), config.stash.get(WATCH, None)
    return {
        "selection": [selection.refused, selection.notes, selection.empty, selection.unasked],
        "facts": vars(RunFacts()),
        "looser": looser_of(config),
        "updates": [],
        "errors": conflicts_of(config),
        "gates": gates_of(config).to_part(),
        "underflow": [site.to_dict() for site in watch.sites.values()] if watch else [],
    }
