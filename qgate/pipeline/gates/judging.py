"""What was measured of a subject is held against what was accepted, whatever the subject is."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from qgate.baselines import Origin, Store, StoredChange
from qgate.errors import QgateError
from qgate.gate import Measured, Policy, Verdict, failure_text, judge
from qgate.gate.checks import ACCEPTABLE, Check
from qgate.gate.updating import Which, hint
from qgate.modes import Mode
from qgate.pipeline.gates.ledger import AcceptedErrors, Decision, Ledger
from qgate.pipeline.gates.rows import record_rows, with_accepted
from qgate.pipeline.gates.subjects import Subject
from qgate.results.pictures import Plots
from qgate.storage.places import shown_below

if TYPE_CHECKING:
    from qgate.storage.places import Place


@dataclass(frozen=True)
class Outcome:
    """One gate: the verdict, what it says if it fails, and what an update will write."""

    verdict: Verdict
    text: str
    record: dict[str, Any]
    decision: Decision

    @property
    def passed(self) -> bool:
        return not self.text

    @property
    def updated(self) -> int:
        """How many entries an update writes; 0 without one."""
        return int(self.record["updated"])


class Judging:
    """The gates of one subject: how they are judged, what an update collects, what is left.

    `command` is how the suites were started, and `spelled` how options are written there: what a
    failure tells people to run again. With `deferred` an outcome is part of the update only when
    it is kept; a dry run judges as if there were no update. `plots` says which comparisons leave
    what is needed to draw them.
    """

    def __init__(
        self,
        subject: Subject,
        baselines: Place,
        policy: Policy,
        updating: Which | None = None,
        dry_run: bool = False,
        deferred: bool = False,
        report: str = "",
        command: str = "pytest suites",
        spelled: Callable[[str], str] = "--{}".format,
        plots: Plots = "none",
    ) -> None:
        self.subject, self.policy, self.plots = subject, policy, plots
        self.dry_run, self.deferred = dry_run, deferred
        self.report, self.command, self.spelled = report, command, spelled
        self.ledger = Ledger(subject, baselines, updating)

    def with_policy(self, policy: Policy, command: str = "") -> Self:
        """The same under other limits, perhaps started in another way; all else is shared."""
        made = copy.copy(self)
        made.policy, made.command = policy, command or self.command
        return made

    @property
    def store(self) -> Store:
        return self.ledger.store

    def origin(self, calibrated: bool = False) -> Origin:
        return self.ledger.origin(calibrated)

    def check_baseline(self) -> None:
        """Refuse to compare with a baseline of something else."""
        self.ledger.check()

    def plans(self) -> dict[str, dict[str, str]]:
        """The plans of the modes that ran, site by site."""
        return {}

    def judge(
        self,
        suite: str,
        mode: Mode,
        measured: Sequence[Measured],
        where: str,
        notes: Mapping[str, Any] | None = None,
        *,
        title: str = "",
        label: str = "mode",
        whole: Sequence[str] = (),
    ) -> Outcome:
        """Hold numbers against their limits and against what was accepted for them.

        `title` names the accepted errors where they are not those of a mode; `whole` are layers
        that were measured whole, even where nothing was found in them.
        """
        title = title or self.ledger.title(mode)
        known = self.ledger.known(title, mode.calibrated)
        rows = [
            with_accepted(row, known.by_site.get((suite, row.site, row.scope), {}))
            for row in measured
        ]
        if idle := self.policy.idle_bounds(rows, mode.name):
            raise QgateError(f"{idle}: it limits nothing. Name its scopes, or leave it out.")
        verdict = judge(
            rows,
            self.policy.limits_of(mode.name),
            self.ledger.same_device(known),
            absent=_gone(known, suite, rows, whole),
        )
        which = self.ledger.updating
        decision = self.ledger.decide(title, suite, mode.calibrated, verdict, which or "failed")
        writes = which is not None and not self.dry_run
        failed = decision.remaining if writes else verdict.failed
        text = self._text(verdict, failed, mode, title, label) if failed else ""
        records = record_rows(
            suite, self.subject.name, mode.name, where, verdict, failed, self.plots
        )
        if notes:
            records = [{**row, "notes": dict(notes)} for row in records]
        updated = decision.entries if writes else 0
        again = self._again(label, mode.name)
        accepted = any(each.kind in ACCEPTABLE for each in failed) and not hint(tuple(failed))
        record = {
            "passed": not failed,
            "updated": updated,
            "title": title,
            "rows": records,
            "options": self._options(*again),
            "accept": self._update_command(*again) if accepted else "",
        }
        outcome = Outcome(verdict, text, record, decision)
        if not self.deferred:
            self.keep(outcome)
        return outcome

    def keep(self, outcome: Outcome, source: str = "") -> None:
        """Make an outcome part of the update."""
        if self.ledger.updating is not None:
            self.ledger.collect(outcome.decision, source)

    def _text(
        self, verdict: Verdict, failed: Sequence[Check], mode: Mode, title: str, label: str
    ) -> str:
        ranked = sorted(failed, key=lambda each: each.place)
        return failure_text(
            Verdict(verdict.measured, tuple(ranked)),
            mode.name,
            label=label,
            baseline=shown_below(Path.cwd(), self.ledger.file(title)),
            command=self._update_command(*self._again(label, mode.name)),
            report=self.report,
        )

    def _again(self, label: str, name: str) -> list[tuple[str, str]]:
        """What has to be typed beside the subject to run one gate again."""
        return [(label, name)]

    def _options(self, *what: tuple[str, str]) -> str:
        return " ".join(
            f"{self.spelled(name)} {shlex.quote(value)}"
            for name, value in (*self.subject.options, *what)
        )

    def _update_command(self, *what: tuple[str, str]) -> str:
        words = [self.command, self._options(*what), self.spelled("update-baselines")]
        return " ".join(filter(None, words))

    # What a run leaves ----------------------------------------------------------------------------

    def leave_candidate(self, folder: Path, outcome: Outcome, source: str) -> None:
        """What a failing gate measured, to be accepted; a passing one takes back what it left."""
        if outcome.passed:
            self.ledger.withdraw(folder, outcome.decision, source)
            return
        made = outcome.decision
        decision = self.ledger.decide(
            made.title, made.suite, made.calibrated, outcome.verdict, "failed"
        )
        self.ledger.propose(folder, decision, outcome.verdict.failed, source)

    def commit(self, dry_run: bool = False) -> list[StoredChange]:
        """Write what was collected, and return what changed; or only say what would."""
        return self.ledger.commit(dry_run)


def _gone(
    known: AcceptedErrors, suite: str, measured: Sequence[Measured], whole: Sequence[str]
) -> set[tuple[str, str]]:
    """What was accepted in the layers and scopes measured here, and was not measured now.

    What is in no layer can be of another test: that is told at the end of a complete run.
    """
    layers = {each.layer for each in measured} - {""}
    scopes, here = {each.scope for each in measured}, {each.key for each in measured}
    accepted = [place for layer in layers for place in known.by_layer.get((suite, layer), ())]
    gone = {place for place in accepted if place[1] in scopes}
    for layer in whole:
        gone |= known.by_layer.get((suite, layer), set())
    return gone - here
