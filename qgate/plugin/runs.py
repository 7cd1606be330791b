"""The state of a run: what it left out, what its tests reported, its device and its folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qgate.loading import LateModule
from qgate.plugin.gate_collection import gates_of, has_fixture
from qgate.plugin.settings import RunOptions, options_of
from qgate.text import one_line

if TYPE_CHECKING:
    from qgate import device_errors as device_errors
    from qgate.baselines.update import StoredChange
    from qgate.gate.sessions import GateSession, Outcome
    from qgate.page.runs import Run
    from qgate.results.coverage import ModeScope, RunExtent
    from qgate.results.movements import Movement
    from qgate.results.run_facts import AcrossWeights, LooserLimit, ModePower, TaskSummary
    from qgate.results.schema import Record
    from qgate.storage import out_folders as out_folders
    from qgate.storage import removing as removing
    from qgate.sweeps.underflow import Watch
else:
    device_errors = LateModule("qgate.device_errors")
    out_folders = LateModule("qgate.storage.out_folders")
    removing = LateModule("qgate.storage.removing")


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


# What the gates of a test decided, with their sessions.
OUTCOMES: pytest.StashKey[list[tuple[GateSession, Outcome]]] = pytest.StashKey()
# Set while a gate computes: what is raised then is plumbing, and no verdict on numbers.
COMPUTING: pytest.StashKey[bool] = pytest.StashKey()
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


# A kernel that ended its device -------------------------------------------------------------------
#
# After a device-side assert nothing runs on that device in this process any more. Gates that need
# it would each end in the same error, or in a crash: they are not held, and say so at once.

_ENDED = 3
_LOSS: pytest.StashKey[str] = pytest.StashKey()
_NEEDED_BY = ("model", "device")
"""Fixtures that something on the device comes from."""


def note_loss(item: pytest.Item, error: BaseException) -> None:
    """Keep that a test lost the device of this process."""
    loss = device_errors.device_error(error, item.name)
    if isinstance(loss, device_errors.LostDeviceError):
        item.config.stash.setdefault(_LOSS, f"{loss} It showed in {item.nodeid}.")


def loss_of(config: pytest.Config) -> str | None:
    """Return how this process lost its device; None if it has it."""
    return config.stash.get(_LOSS, None)


def end_worker_without_device(config: pytest.Config) -> None:
    """End a worker of pytest-xdist that lost its device: another one takes its other gates.

    An update goes on, as it has to say that it writes nothing.
    """
    is_worker = hasattr(config, "workerinput")
    if is_worker and loss_of(config) is not None and options_of(config).update is None:
        os._exit(_ENDED)


def refuse_without_device(item: pytest.Item) -> None:
    """End the set-up of a test that needs a device which this process lost."""
    loss = loss_of(item.config)
    if loss is not None and has_fixture(item, *_NEEDED_BY):
        pytest.fail(f"not held: {one_line(loss)}", pytrace=False)


# The folder of a run, as pytest and its workers know it -------------------------------------------


_FOLDER: pytest.StashKey[Path] = pytest.StashKey()
_WORKER_INPUT = "qgate_out"


def reserve_out_folder(config: pytest.Config, home: Path) -> None:
    """Hold a folder to the end of this run; where none can be written, the run says so later."""
    holding = contextlib.ExitStack()
    with contextlib.suppress(OSError):
        config.stash[_FOLDER] = holding.enter_context(out_folders.held_out_folder(home))
    config.add_cleanup(holding.close)


def out_folder_notes(config: pytest.Config) -> list[str]:
    """Say where a run wrote that is not the usual place."""
    name = config.stash.get(_FOLDER, Path(out_folders.OUT)).name
    other = f"another run writes to {out_folders.OUT}: this one wrote to {name}"
    return [] if name == out_folders.OUT else [other]


def out_folder(config: pytest.Config, home: Path) -> Path:
    """Return the folder of this run, which workers of pytest-xdist are told."""
    folder_name = getattr(config, "workerinput", {}).get(_WORKER_INPUT)
    return Path(folder_name) if folder_name else config.stash.get(_FOLDER, home / out_folders.OUT)


def tell_worker_folder(config: pytest.Config, workerinput: dict[str, object]) -> None:
    if _FOLDER in config.stash:
        workerinput[_WORKER_INPUT] = str(config.stash[_FOLDER])


def remove_reproductions(folder: Path, current: Collection[str]) -> list[str]:
    """Remove the reproductions of earlier runs; say why where they stay."""
    patterns = [f"*/{name}" for name in out_folders.REPRODUCTION_FILES]
    try:
        removing.clear(
            folder.parent, f"{folder.name}/{out_folders.REPRODUCTIONS}", patterns, keep=current
        )
    except removing.LinkError as error:
        return [f"reproductions of earlier runs are still there: {error}"]
    return []


def remove_stale(folder: Path, *current: str) -> None:
    """Remove results of an earlier run, which would pass for those that could not be written."""
    names = {"results.jsonl", "results.csv", "report.html"} - {*current}
    with contextlib.suppress(OSError, removing.LinkError):
        removing.remove_files(folder.parent, *(f"{folder.name}/{name}" for name in sorted(names)))
