"""One model under the gate: what was measured is held against what was accepted."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qgate import formats, modes
from qgate.baselines import Change, Origin, Store
from qgate.errors import QgateError, unknown
from qgate.gate import Measured, Policy, Verdict, failure_text, judge
from qgate.gate.checks import Check
from qgate.gate.updating import Which
from qgate.modes import Mode, apply
from qgate.modes.formats import FP32
from qgate.pipeline.bench import Bench
from qgate.pipeline.format_rows import FORMAT_METRICS, overflow_rows, scaling_rows
from qgate.pipeline.gate_rows import PLAN_METRICS, measured_of, record_rows, with_accepted
from qgate.pipeline.ledger import Decision, Known, Ledger
from qgate.pipeline.self_checks import (
    BROKEN,
    HEALTHY,
    identity,
    perturbation_shows,
    stored_reference,
    unquantized,
)
from qgate.pipeline.tasks import task_values


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


@dataclass
class GateSession:
    """The gates of one model.

    `command` is how the suites were started, and `spelled` how options are written there: what a
    failure tells people to run again. With `deferred` an outcome is part of the update only when
    it is kept; a dry run judges as if there were no update. A copy with another policy shares
    everything else.
    """

    bench: Bench
    baselines: Path
    policy: Policy
    updating: Which | None = None
    dry_run: bool = False
    deferred: bool = False
    report: str = ""
    command: str = "pytest suites"
    spelled: Callable[[str], str] = "--{}".format
    ledger: Ledger = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.ledger is None:
            self.ledger = Ledger(self.bench, self.baselines, self.updating)

    def with_policy(self, policy: Policy) -> GateSession:
        """The same session under other limits."""
        return replace(self, policy=policy)

    @property
    def store(self) -> Store:
        return self.ledger.store

    def origin(self, calibrated: bool = False) -> Origin:
        return self.ledger.origin(calibrated)

    # Before anything is compared ------------------------------------------------------------------

    def check_baseline(self) -> None:
        """Refuse to compare with a baseline of something else."""
        self.ledger.check()

    def check_policy(self, policy: Policy | None = None) -> None:
        """Refuse a rule or marker that fits no site or no mode: it would limit nothing."""
        checked = policy or self.policy
        names = [site.name for site in self.bench.model.sites()]
        checked.check_sites([*names, "logits"])
        own = (*self.bench.model.modes, *self.bench.setup.modes)
        checked.check_modes([*modes.names(), *own, *formats.names(), HEALTHY.name])

    def prepare(self, mode: Mode) -> None:
        """Resolve a mode, its scales and its accepted errors: what fails here is no verdict."""
        if self.ledger.updating is None:
            self.ledger.known(self.ledger.title(mode), mode.calibrated)
        if reason := self.apart(mode):
            raise QgateError(reason)
        self.bench.quantized(mode)

    def apart(self, mode: Mode) -> str:
        """Why a mode cannot be compared with the reference chosen; empty where it can."""
        basis = self.bench.reference_basis()
        own = self.bench.model.basis if mode.own else mode.basis
        if basis is None or basis == own:
            return ""
        return (
            f"mode {mode.name!r} is in basis {own!r}, and the reference "
            f"{self.bench.reference_mode!r} in {basis!r}: choose modes of one basis, or "
            "--reference fp32."
        )

    # The gates ------------------------------------------------------------------------------------

    def layer(self, suite: str, mode: Mode, layer: str) -> Outcome:
        """The errors of one layer in one mode."""
        self._check_layer(layer)
        rows = [measured_of(row) for row in self.bench.measure(mode) if row.layer == layer]
        return self.judge(suite, mode, rows, layer)

    def gradients(self, suite: str, mode: Mode, layer: str) -> Outcome:
        """The gradients of one layer in one mode."""
        self._check_layer(layer)
        rows = [measured_of(row) for row in self.bench.gradients(mode) if row.layer == layer]
        return self.judge(suite, mode, rows, layer)

    def _check_layer(self, layer: str) -> None:
        if layer not in self.bench.layers:
            raise unknown(f"layer of {self.bench.model.name}", layer, self.bench.layers)

    def scaling(self, suite: str, fmt: str, layer: str) -> Outcome:
        """The scale of a format that suits each tensor of a layer, and the error at it."""
        known = self.ledger.known(fmt, False)
        exponents = {
            site: found["exponent"]
            for (of, site, scope), found in known.by_site.items()
            if (of, scope) == (suite, "sweep") and "exponent" in found
        }
        same = self.ledger.same_device(known)

        def tolerance(site: str) -> float:
            return self.policy.limits_for(site, fmt, "sweep").tolerance(same)

        rows, notes = scaling_rows(self.bench, fmt, layer, exponents, tolerance)
        return self._of_format(suite, fmt, rows, layer, notes)

    def overflow(self, suite: str, fmt: str, layer: str, phase: str) -> Outcome:
        """What a format clips and makes zero in the tensors or gradients of a layer."""
        rows = overflow_rows(self.bench, fmt, layer, phase)
        return self._of_format(suite, fmt, rows, f"{layer} {phase}", {})

    def _of_format(
        self, suite: str, fmt: str, rows: list[Measured], where: str, notes: Mapping[str, Any]
    ) -> Outcome:
        mode = Mode(fmt, "the format alone")
        return self.judge(suite, mode, rows, where, notes, title=fmt, label="format")

    def reference(self, suite: str) -> Outcome:
        """The stored reference is the live one, and that one is unquantized.

        An update records it where there is none, where it is of something else, or out of its
        noise; one that only adds leaves it alone.
        """
        which = self.ledger.updating
        stored = [] if self.ledger.misfits() else self.store.bases()
        if which is None and not stored:
            raise QgateError(
                f"there is no baseline of {self.bench.model.name} in {str(self.store.folder)!r}: "
                f"{self._update_command()} records one."
            )
        rows = {row.site: row for basis in stored for row in self._stored(basis, which)}
        limits = self.policy.limits_of(FP32.name)
        moved = not rows or not judge(list(rows.values()), limits, True).passed
        anew = which is not None and ((moved and which != "new") or not stored or which == "all")
        held = [] if anew and not self.dry_run else list(rows.values())
        outcome = self.judge(suite, FP32, held + unquantized(self.bench), "reference", title="fp32")
        if outcome.passed and not perturbation_shows(self.bench):
            return _red(outcome, "a weight moved by a thousandth does not show in the reference")
        if not anew or self.dry_run:
            return outcome
        if not self.deferred:
            self.keep(replace(outcome, decision=replace(outcome.decision, anew=True)))
        record = {**outcome.record, "updated": int(moved)}
        return replace(outcome, record=record, decision=replace(outcome.decision, anew=True))

    def _stored(self, basis: str, which: Which | None) -> list[Measured]:
        live = self.ledger.reference_tensors(basis)
        try:
            return stored_reference(self.bench, basis, self.store.reference(basis), live)
        except QgateError:
            if which in (None, "new"):
                raise
            return []

    def canary(self, suite: str) -> Outcome:
        """A quantizer that truncates is rejected: the gate can fail."""
        bench = self.bench
        healthy, broken = (apply(mode, bench.model) for mode in (HEALTHY, BROKEN))
        rows = {
            name: [measured_of(row, gated=()) for row in bench.site_errors(quantized, healthy)]
            for name, quantized in (("healthy", healthy), ("broken", broken))
        }
        metrics = {**FORMAT_METRICS, **PLAN_METRICS}
        limits = self.policy.limits_of(HEALTHY.name)
        seen = judge(rows["broken"], limits, True, metrics=metrics)
        outcome = self.judge(suite, HEALTHY, rows["healthy"], "canary", title=HEALTHY.name)
        if seen.passed or all(check.kind != "budget" for check in seen.failed):
            return _red(outcome, "a quantizer that truncates passes the gate: it gates nothing")
        if not identity(bench):
            return _red(outcome, "a plan that quantizes nothing changes the model's output")
        return outcome

    def task(self, suite: str, mode: Mode) -> Outcome:
        """How much worse the model does its work."""
        values, notes = task_values(self.bench, mode)
        measured = Measured(
            site="logits", layer="", scope="task", values=values, order=0,
            nonfinite=sum(not math.isfinite(v) for v in values.values()),
        )  # fmt: skip
        return self.judge(suite, mode, [measured], "logits", notes)

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
    ) -> Outcome:
        """Hold numbers against their limits and against what was accepted for them.

        `title` names the accepted errors where they are not those of a mode.
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
            absent=_gone(known, suite, rows),
            metrics={**FORMAT_METRICS, **PLAN_METRICS},
        )
        which = self.ledger.updating
        decision = self.ledger.decide(title, suite, mode.calibrated, verdict, which or "failed")
        writes = which is not None and not self.dry_run
        failed = decision.remaining if writes else verdict.failed
        text = self._text(verdict, failed, mode, title, label) if failed else ""
        records = record_rows(suite, self.bench.model.name, mode.name, where, verdict, failed)
        if notes:
            records = [{**row, "notes": dict(notes)} for row in records]
        updated = decision.entries if writes else 0
        record = {"passed": not failed, "updated": updated, "title": title, "rows": records}
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
            baseline=_shown(self.ledger.file(title)),
            command=self._update_command(label, mode.name),
            report=self.report,
        )

    def _update_command(self, *what: str) -> str:
        words = ("model", self.bench.setup.model, *what)
        named = [
            f"{self.spelled(name)} {shlex.quote(value)}"
            for name, value in zip(words[::2], words[1::2], strict=True)
        ]
        return " ".join([self.command, *named, self.spelled("update-baselines")])

    # What a run leaves ----------------------------------------------------------------------------

    def plans(self) -> dict[str, dict[str, str]]:
        """The plans of the modes that ran, site by site."""
        return {
            name: {entry.site: f"{entry.does}; {entry.origin}" for entry in made.plan.entries}
            for name, made in self.bench.ran().items()
        }

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

    def commit(self, dry_run: bool = False) -> list[Change]:
        """Write what was collected, and return what changed; or only say what would."""
        return self.ledger.commit(dry_run)


def _gone(known: Known, suite: str, measured: Sequence[Measured]) -> set[tuple[str, str]]:
    """What was accepted in the layers and scopes measured here, and was not measured now.

    What is in no layer can be of another test: that is told at the end of a complete run.
    """
    layers = {each.layer for each in measured} - {""}
    scopes, here = {each.scope for each in measured}, {each.key for each in measured}
    accepted = [place for layer in layers for place in known.by_layer.get((suite, layer), ())]
    return {place for place in accepted if place[1] in scopes and place not in here}


def _shown(file: Path) -> str:
    """A path as seen from here, where it lies below."""
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)


def _red(outcome: Outcome, text: str) -> Outcome:
    """An outcome that failed as a whole, whatever its sites say."""
    first, *rest = outcome.record["rows"]
    rows = [{**first, "passed": False, "failure": text}, *rest]
    record = {**outcome.record, "passed": False, "updated": 0, "rows": rows}
    return Outcome(outcome.verdict, text, record, replace(outcome.decision, values={}, drops=()))
