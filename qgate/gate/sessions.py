"""The path from measured rows to a verdict and its record, the same for every kind of gate.

A gate measures rows and gives them to `GateSession.judge`. A new kind of gate is a session with
such methods, and a `GateKind` (`qgate.project.gate_kinds`) that says how it is opened.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from qgate.baselines import (
    Candidate,
    Key,
    Origin,
    Store,
    StoredChange,
    drop_candidate,
    kind_of,
    write_candidate,
)
from qgate.errors import QgateError
from qgate.gate.across_weights import NOT_ACROSS_WEIGHTS, comparable
from qgate.gate.checks import Check, Verdict, judge, smallest_defects
from qgate.gate.ledger import Decision, Ledger, Which, with_accepted
from qgate.gate.measured import Measured
from qgate.gate.policy import Policy
from qgate.gate.subjects import Subject
from qgate.gate.texts import failure_text, finding, hint
from qgate.metrics.grades import grades_of
from qgate.results import binding
from qgate.results.checks import severity
from qgate.results.coverage import ModeScope
from qgate.results.failure_causes import KnownCauses
from qgate.results.pictures import Plots
from qgate.results.run_facts import AcrossWeights, ModePower, TaskSummary, add_power
from qgate.results.schema import Record
from qgate.storage.locations import short_path

if TYPE_CHECKING:
    from qgate.modes import Mode


Room = Mapping[tuple[str, str], Mapping[str, float]]
"""By site and scope, and by metric: how much more error than the accepted one is none."""

# Failing rows of a gate that can be drawn, worst first: a broken mode fails at every site.
MOST_DRAWN = 8


@dataclass(frozen=True)
class Outcome:
    """Result of one gate: the verdict, its text if it fails, and what an update will write."""

    verdict: Verdict
    text: str
    record: Record
    decision: Decision

    @property
    def passed(self) -> bool:
        return not self.text

    @property
    def updated(self) -> int:
        """Count the entries that an update writes; 0 without one."""
        return int(self.record["updated"])

    def failed_as_whole(self, text: str) -> Outcome:
        """Return it as failed, whatever its sites say."""
        first, *more = self.record["rows"]
        rows = [{**first, "passed": False, "failure": text}, *more]
        record = {**self.record, "passed": False, "updated": 0, "rows": rows}
        return Outcome(self.verdict, text, record, replace(self.decision, values={}, drops=()))


Method = TypeVar("Method", bound=Callable[..., Outcome])


def gate(method: Method) -> Method:
    """Mark a method of a session as a gate, which tests call by its name without the suite.

    A parameter called `mode` is a mode, which tests give by its name.
    """
    method.is_gate = True  # type: ignore[attr-defined]
    return method


class GateSession:
    """Gates of one subject: their limits, their accepted errors, and the update they collect.

    `command` is how the suites were started, and `spelled` how options are written there: a
    failure shows them as the command to run again. With `deferred` an outcome is part of the update
    only when it is kept; a dry run judges as if there were no update. An update writes nothing of a
    gate with another plan, unless `accept_plan`. `plots` says which comparisons can be drawn later.
    With `across_weights` relative errors are held against a baseline of other weights.
    """

    accepts = True
    """True if what its gates measure is compared with accepted errors, and may become one.

    Others need no baseline, write none, and count as no comparison with FP32.
    """

    def __init__(
        self,
        subject: Subject,
        baselines: Path,
        policy: Policy,
        updating: Which | None = None,
        dry_run: bool = False,
        deferred: bool = False,
        report: str = "",
        command: str = "pytest suites",
        spelled: Callable[[str], str] = "--{}".format,
        plots: Plots = "none",
        accept_plan: bool = False,
        across_weights: bool = False,
    ) -> None:
        self.subject, self.policy, self.plots = subject, policy, plots
        self.dry_run, self.deferred = dry_run, deferred
        self.report, self.command, self.spelled = report, command, spelled
        self.known_causes = KnownCauses()
        self._positions: dict[str, dict[str, tuple[int, ...]]] = {}
        self._power: list[ModePower] = []
        self.tasks: list[TaskSummary] = []
        self.ledger = Ledger(
            subject,
            baselines,
            updating,
            lambda title: self.update_command(*subject.selecting(title)),
            accept_plan,
            across_weights,
        )
        self._across = AcrossWeights(
            model=subject.name,
            baseline=short_path(Path.cwd(), self.store.folder),
            accepted=[],
            weights="",
            room={},
            left_out=[],
        )

    def with_policy(self, policy: Policy, command: str = "") -> Self:
        """Return it under other limits, perhaps started in another way; all else is shared."""
        other = copy.copy(self)
        other.policy, other.command = policy, command or self.command
        return other

    @classmethod
    def gates(cls) -> dict[str, Callable[..., Outcome]]:
        """Return the gates of these sessions by their names."""
        methods = {name: getattr(cls, name) for name in dir(cls)}
        return {name: method for name, method in methods.items() if hasattr(method, "is_gate")}

    @property
    def store(self) -> Store:
        return self.ledger.store

    def origin(self, calibrated: bool = False) -> Origin:
        return self.ledger.origin(calibrated)

    def check_baseline(self) -> None:
        """Refuse to compare with a baseline of something else."""
        if self.accepts:
            self.ledger.check()

    def check_policy(self, policy: Policy | None = None) -> None:
        """Refuse a rule or marker that fits no site or no mode: it would limit nothing."""

    def layers(self, suite: str) -> list[str]:  # noqa: ARG002
        """List the layers or parts of the subject, and those a suite has accepted figures of."""
        return []

    def left_out(self, suite: str, fmt: str, layer: str) -> str | None:  # noqa: ARG002
        """Say why a format cannot be looked at in a layer; empty where there is no such layer."""
        return None

    def mode_named(self, name: str) -> Mode:
        """Return the mode that a test names."""
        raise QgateError(f"gates of {self.subject.name} have no modes, and {name!r} is one.")

    def prepare(self, mode: str) -> None:
        """Make ready what a test with a mode needs: what fails here is no verdict."""

    def title_of(self, mode: str, fmt: str) -> tuple[str, bool] | None:  # noqa: ARG002
        """Return the name of a test's accepted errors, and whether a calibration decides them."""
        return None

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
        """Compare numbers with their limits and with what was accepted for them.

        `title` names the accepted errors where they are not those of a mode, `label` the option
        that selects this gate; `whole` are layers that were measured whole, even if no site was
        in them.
        """
        ledger = self.ledger
        title = title or self.subject.title(mode.name)
        accepted = ledger.accepted(title, mode.calibrated)
        rows = [
            with_accepted(
                row,
                accepted.by_site.get((suite, row.site, row.scope), {}),
                accepted.devices_at(suite, row.site, row.scope),
                kind_of(ledger.origin().device),
            )
            for row in measured
        ]
        compared = self._positions.setdefault(mode.name, {})
        # A format that is swept may have the name of a mode, and has no positions.
        forward = (row for row in rows if row.about.of_whole_model)
        compared |= {row.site: row.positions for row in forward}
        if idle := self.policy.idle_bounds(rows, mode.name):
            raise QgateError(f"{idle}: it limits nothing. Name its scopes, or leave it out.")
        limits_of = self.policy.limits_of(mode.name, bool(accepted.other_weights))
        left_out: list[str] = []
        if accepted.other_weights:
            pairs = [comparable(row) for row in rows]
            rows = [row for row, _ in pairs]
            left_out = list(dict.fromkeys(text for _, texts in pairs for text in texts))
        absent = accepted.absent_sites(suite, rows, whole)
        kept_on = {
            (key.site, key.scope): accepted.elsewhere[key]
            for key in accepted.foreign
            if key.suite == suite and (key.site, key.scope) in absent
        }
        verdict = judge(rows, limits_of, absent=absent, kept_on=kept_on)
        explained, why = self.explain_more_error(mode, verdict)
        if explained:
            rows = [
                replace(row, device_room={**row.device_room, **explained.get(row.key, {})})
                for row in rows
            ]
            verdict = judge(rows, limits_of, absent=absent, kept_on=kept_on)
            notes = {**(notes or {}), **why}
        if accepted.other_weights:
            self._note_across_weights(accepted.other_weights, left_out, verdict)
        self._power[:] = add_power(
            self._power,
            [ModePower(model=self.subject.name, mode=mode.name, defects=smallest_defects(verdict))],
        )
        decision = ledger.decide(
            title, suite, mode.calibrated, verdict, ledger.updating or "failed"
        )
        writes = ledger.updating is not None and not self.dry_run
        failed = decision.remaining if writes else verdict.failed
        # Options beside those of the subject that run this gate again.
        selecting = [(label, mode.name)] if label in ("mode", "format") else []
        accept_command = self.update_command(*selecting)
        if any(check.is_plan_change for check in verdict.failed):
            accept_command += f" {self.spelled('accept-plan')}"
        diagnoses = self.diagnose(mode, verdict) if failed else {}
        records = record_rows(
            suite, self.subject.name, mode.name, where, verdict, failed, self.plots, diagnoses
        )
        for row in (row for row in records if not row["passed"]):
            if code := self.code_of(mode, row):
                row["code"] = code
        earlier, text = self.known_causes.add(records), ""
        if failed:
            in_order = tuple(sorted(failed, key=lambda check: check.position))
            text = failure_text(
                Verdict(verdict.measured, in_order),
                mode.name,
                label=label,
                baseline=ledger.baseline_text(title, accepted) if self.accepts else "",
                command=accept_command,
                report=self.report,
                diagnoses=diagnoses,
                earlier=earlier,
            )
        if left_out:
            notes = {**(notes or {}), NOT_ACROSS_WEIGHTS: left_out}
        if notes:
            records = [{**row, "notes": dict(notes)} for row in records]
        acceptable = any(check.limit.is_acceptable for check in failed) and not hint(tuple(failed))
        record = {
            "passed": not failed,
            "updated": decision.entries if writes else 0,
            "title": title,
            "rows": records,
            "options": self._options(*selecting),
            "accept": accept_command if acceptable else "",
        }
        outcome = Outcome(verdict, text, record, decision)
        if not self.deferred:
            self.keep(outcome)
        return outcome

    def _note_across_weights(
        self, other_weights: str, left_out: Sequence[str], verdict: Verdict
    ) -> None:
        """Note weights whose errors were held, with which room, and what of them was not."""
        across = self._across
        across["accepted"] = sorted({*across["accepted"], other_weights})
        self.note_left_out(left_out)
        for check in verdict.checks:
            if check.limit.is_accepted and check.allowed and "@" not in check.metric:
                shares = [*across["room"].get(check.scope, ()), check.allowed]
                across["room"][check.scope] = [min(shares), max(shares)]

    def note_left_out(self, left_out: Sequence[str]) -> None:
        """Note what cannot be compared across weights."""
        self._across["left_out"] = list(dict.fromkeys([*self._across["left_out"], *left_out]))

    def across_weights(self) -> AcrossWeights | None:
        """Return what was held across weights; None where nothing was meant to be."""
        weights, recorded = self.origin().weights, self.ledger.recorded
        if not (self.accepts and self.ledger.across_weights and self._positions and recorded):
            return None
        if recorded.is_collected:
            return None
        accepted_weights = {*self._across["accepted"], recorded.weights} - {weights}
        return {**self._across, "weights": weights, "accepted": sorted(accepted_weights)}

    def diagnose(self, mode: Mode, verdict: Verdict) -> Mapping[tuple[str, str], str]:  # noqa: ARG002
        """Say by site and scope what is wrong with tensors that failed, where they tell."""
        return {}

    def explain_more_error(self, _mode: Mode, _verdict: Verdict) -> tuple[Room, Mapping[str, str]]:
        """Return by how much right code may exceed what was accepted, and notes that say why."""
        return {}, {}

    def code_of(self, mode: Mode, row: Record) -> str:  # noqa: ARG002
        """Return `FILE:LINE NAME` of one's own code that a failed comparison is about."""
        return ""

    def leave_reproduction(self, folder: Path, outcome: Outcome) -> Path | None:  # noqa: ARG002
        """Write what compares the first failing site of a mode again; None if there is nothing."""
        return None

    def _options(self, *selecting: tuple[str, str]) -> str:
        return " ".join(
            f"{self.spelled(name)} {shlex.join(values)}"
            for name, *values in (*self.subject.options, *selecting)
        )

    def update_command(self, *selecting: tuple[str, str]) -> str:
        """Return the command that accepts what a gate measured."""
        words = [self.command, self._options(*selecting), self.spelled("update-baselines")]
        return " ".join(filter(None, words))

    def scopes(self) -> list[ModeScope]:
        """Return what there is to compare of the modes judged, and where they were compared."""
        judged = self._positions if self.accepts else {}
        return [
            replace(scope, positions=judged[scope.mode]) for scope in self.subject.scopes(judged)
        ]

    def power(self) -> list[ModePower]:
        """Return the smallest defects that the limits would have seen in the modes judged."""
        return [mode for mode in self._power if mode["defects"]]

    # Updates and candidates -----------------------------------------------------------------------

    def keep(self, outcome: Outcome, source: str = "") -> None:
        """Make an outcome part of the update."""
        if self.accepts and self.ledger.updating is not None:
            self.ledger.collect(outcome.decision, source)

    def leave_candidate(self, folder: Path, outcome: Outcome, source: str) -> None:
        """Leave what a failing gate measured for `qgate baselines accept`, or take it back.

        It is what an update would have written; what no update accepts is there with the reason.
        """
        if not self.accepts:
            return
        verdict, decision = outcome.verdict, outcome.decision
        title, suite, calibrated = decision.title, decision.suite, decision.calibrated
        # What was held across weights replaces a baseline as a whole, or nothing of it.
        if outcome.passed or self.ledger.accepted(title, calibrated).other_weights:
            drop_candidate(folder, self.subject.name, title, source)
            return
        decision = self.ledger.decide(title, suite, calibrated, verdict, "failed", accept_plan=True)
        values, barred = dict(decision.values), {}
        for check in verdict.failed:
            if not check.limit.is_acceptable and check.value is not None and check.metric:
                key = Key(suite, check.site, check.scope, check.metric)
                values[key] = check.value
                barred[key] = f"{check.kind}: {check.reason or 'limit broken'}"
        if values or decision.drops:
            origin, gone = self.origin(calibrated), decision.drops
            candidate = Candidate(origin, title, source, values, barred, calibrated, gone)
            write_candidate(folder, candidate)

    def commit(self, dry_run: bool = False) -> list[StoredChange]:
        """Write what was collected and return what changed; a dry run writes nothing."""
        return self.ledger.commit(dry_run)


def record_rows(
    suite: str,
    model: str,
    mode: str,
    where: str,
    verdict: Verdict,
    failed: Sequence[Check],
    plots: Plots = "none",
    diagnoses: Mapping[tuple[str, str], str] | None = None,
) -> list[dict[str, object]]:
    """Return one record per site and scope; those that may be drawn carry what that takes.

    `diagnoses` say what is wrong at sites and scopes, where tensors told.
    """
    about = {"suite": suite, "model": model, "mode": mode}
    broken: dict[tuple[str, str], Check] = {}
    for failure in failed:
        key = (failure.site, failure.scope)
        broken[key] = min(broken.get(key, failure), failure, key=lambda c: c.badness)
    rows = []
    for measured in verdict.measured:
        checks = [c for c in verdict.checks if (c.site, c.scope) == measured.key]
        row: dict[str, object] = {
            **about,
            "layer": measured.layer or where,
            "site": measured.site,
            "scope": measured.scope,
            "order": measured.order,
            "values": dict(measured.values),
            "ideal": dict(measured.ideal or {}),
            "accepted": dict(measured.accepted or {}),
            "checks": [check.to_dict() for check in checks],
            "passed": measured.key not in broken,
        }
        if (check := broken.get(measured.key)) is not None:
            row["finding"] = finding(check, (diagnoses or {}).get(measured.key, ""))
        if calm := measured.parts.get("without_massive"):
            row["without_massive"] = dict(calm)
        if measured.about.has_grades and (grades := grades_of(measured.values)):
            row["grades"] = grades
        rows.append(row)
    drawable = [index for index, row in enumerate(verdict.measured) if row.pictures]
    for index in _rows_to_draw(rows, drawable, plots):
        rows[index]["pictures"] = [dict(picture) for picture in verdict.measured[index].pictures]
    nothing: dict[str, object] = {"values": {}, "ideal": {}, "accepted": {}}
    return rows + [
        {**about, "layer": where, "order": check.order, "site": check.site, "scope": check.scope}
        | {**nothing, "checks": [check.to_dict()], "passed": False, "finding": finding(check)}
        for check in failed
        if check.limit.is_absent
    ]


def _rows_to_draw(
    rows: Sequence[Mapping[str, Any]], drawable: Sequence[int], plots: Plots
) -> list[int]:
    """Return the indices of rows that failed, or of the one that came nearest to its limit."""
    if plots == "none":
        return []

    def rank(index: int) -> tuple[Any, ...]:
        check = binding(rows[index])
        return (not rows[index]["passed"], *(severity(check) if check else ()))

    ranked = sorted(drawable, key=rank, reverse=True)
    failed = [index for index in ranked if not rows[index]["passed"]][:MOST_DRAWN]
    return failed or (ranked[:1] if plots != "failed" else [])
