"""Gates of a sync, and of the steps of a run: they need no baseline and accept nothing.

They fail where `qgate engines` has exit status 1: weights that are not the trainer's, figures that
rise from a step on, and limits of the project's settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from qgate.baselines import Origin
from qgate.engines.series import compare_steps, find_steps
from qgate.engines.series_record import SeriesRecord
from qgate.engines.series_texts import drift_text, figure_name
from qgate.engines.series_texts import headline as series_headline
from qgate.engines.sync import compare_sync
from qgate.engines.sync_record import SyncRecord
from qgate.engines.sync_texts import group_text
from qgate.engines.sync_texts import headline as sync_headline
from qgate.errors import QgateError, unknown
from qgate.gate.measured import Measured
from qgate.gate.policy import FINDINGS, Policy
from qgate.gate.sessions import GateSession, Outcome, gate
from qgate.gate.subjects import Subject, commit_here
from qgate.modes import Mode

SYNC, STEPS = "sync", "steps"
SCOPE = "engines"
Note = Callable[[Sequence[str]], None]


class RunSubject(Subject):
    """A sync or the steps of a run, with the options that name it."""

    part = ""

    def __init__(self, name: str, paths: Sequence[str], options: Sequence[tuple[str, ...]]) -> None:
        self.name, self.paths, self.options = name, paths, list(options)

    def origin(self) -> Origin:
        return Origin.of_subject(
            "engines", self.name, str(torch.__version__), commit_here(), self.part
        )

    def layer_of(self, site: str) -> str:  # noqa: ARG002
        return SCOPE

    def check(self) -> None:
        """Refuse what cannot be compared, before anything is."""


class SyncSubject(RunSubject):
    """An engine's probe, and the trainer whose weights it was given."""

    part = SYNC

    @cached_property
    def record(self) -> SyncRecord:
        return compare_sync(self.paths[0], self.paths[1])


class StepsSubject(RunSubject):
    """A folder of steps, with a trainer and a rollout engine in each."""

    part = STEPS

    def __init__(self, *subject: Any, head: str = "") -> None:
        super().__init__(*subject)
        self.head = head

    def check(self) -> None:
        find_steps(self.paths[0])

    @cached_property
    def record(self) -> SeriesRecord:
        return compare_steps(self.paths[0], head=self.head)


class RunGates(GateSession):
    """The gate of a sync or of the steps of a run."""

    accepts = False
    subject: SyncSubject | StepsSubject

    def __init__(
        self, subject: RunSubject, baselines: Path, policy: Policy, *, note: Note, **options: Any
    ) -> None:
        declared = policy.without_findings(SCOPE, "gates of engines")
        super().__init__(subject, baselines, declared, **options)
        self._note = note

    def layers(self, suite: str) -> list[str]:  # noqa: ARG002
        return [self.subject.part]

    def check_policy(self, policy: Policy | None = None) -> None:
        narrow = (policy or self.policy).own()
        if any(setting.sites for setting in narrow.settings):
            narrow.check_sites([row.site for row in self._rows()])
        narrow.check_modes([SYNC, STEPS])

    def notes(self) -> list[str]:
        """Return the result in one line, and what was not compared."""
        record = self.subject.record
        if isinstance(record, SyncRecord):
            return [sync_headline(record), *record.notes]
        return [series_headline(record), *record.notes]

    @gate
    def part(self, suite: str, part: str) -> Outcome:
        """Judge the sync or the steps."""
        if part != self.subject.part:
            raise unknown("part of engines", part, [self.subject.part])
        mode = Mode(part, "an engine beside its trainer")
        # Said here, and not when tests are collected: only the process of the gate compares.
        self._note([f"engines: {note}" for note in self.notes()])
        notes = {"engines": " and ".join(self.subject.paths)}
        return self.judge(suite, mode, self._rows(), SCOPE, notes, label=SCOPE, whole=[SCOPE])

    def _rows(self) -> list[Measured]:
        record = self.subject.record
        rows = sync_rows(record) if isinstance(record, SyncRecord) else series_rows(record)
        listed = [
            Measured(
                site=site, layer=SCOPE, scope=SCOPE, values={FINDINGS: float(bool(why)), **values},
                order=order, nonfinite=0, gated=(), why={FINDINGS: why} if why else {},
            )
            for order, (site, why, values) in enumerate(rows)
        ]  # fmt: skip
        if not listed:
            raise QgateError(f"nothing of {self.subject.name} is compared: no weight, no step.")
        return listed


Row = tuple[str, str, Mapping[str, float | None]]
"""A site, what is wrong there in words, and its figures."""


def sync_rows(record: SyncRecord) -> Iterator[Row]:
    """Yield a row for each kind of finding, each limit that is exceeded, and all weights."""
    for group in record.groups:
        if group.relation != "near":
            yield group.where.partition(" ")[2], group_text(record, group), {}
    for reason in record.beyond:
        yield "the engine", reason, {}
    compared = record.exact + record.nearest + len(record.findings)
    if compared:
        figures = {} if record.k3 is None else {"k3": record.k3}
        yield "all weights", "", {**figures, "compared_tokens": float(record.tokens)}


def series_rows(record: SeriesRecord) -> Iterator[Row]:
    """Yield a row for each figure that rises, each limit that is exceeded, and each step."""
    for drift in record.drifts:
        if drift.rises:
            name = figure_name(record, drift.figure)
            yield name, drift_text(record, drift).removeprefix(f"{name} "), {}
    for reason in record.beyond:
        yield "the steps", reason, {}
    for step in record.steps:
        figures = {
            "kl" if record.is_kl else "k3": step.mean,
            "largest_logprob": step.largest,
            "compared_tokens": float(step.tokens),
        }
        flips = {} if step.flips is None else {"flips_share": step.flips}
        yield f"step {step.step}", "", {**figures, **flips}
