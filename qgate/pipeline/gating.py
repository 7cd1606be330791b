"""One model under the gate: what was measured is held against what was accepted."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qgate.baselines import Candidate, Key, Origin, Store, drop_candidate, write_candidate
from qgate.baselines import Change as StoredChange
from qgate.errors import QgateError
from qgate.gate import Measured, Policy, Verdict, failure_text, judge
from qgate.gate.checks import ACCEPTABLE, Check
from qgate.gate.updating import Which
from qgate.modes import Mode, apply
from qgate.modes.formats import FP32
from qgate.pipeline.bench import Bench
from qgate.pipeline.format_rows import SHARES, overflow_rows, scaling_rows
from qgate.pipeline.gate_rows import accepted_of, measured_of, record_rows
from qgate.pipeline.ledger import Ledger
from qgate.pipeline.passes import short_layer
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
    updated: int
    record: dict[str, Any]

    @property
    def passed(self) -> bool:
        return not self.text


@dataclass
class GateSession:
    """The gates of one model.

    `command` is how the suites were started, and `spelled` how options are written there: what a
    failure tells people to run again. A copy with another policy shares everything else.
    """

    bench: Bench
    baselines: Path
    policy: Policy
    updating: Which | None = None
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

    def check_policy(self) -> None:
        """Refuse a rule or marker whose expression finds no site: it would limit nothing."""
        names = [site.name for site in self.bench.model.sites()]
        self.policy.check_sites([*names, "logits"])

    def prepare(self, mode: Mode) -> None:
        """Resolve a mode, its scales and its accepted errors: what fails here is no verdict."""
        if self.ledger.updating is None:
            self.ledger.accepted(self.ledger.title(mode), mode.calibrated)
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
        rows = [row for row in self.bench.measure(mode) if row.layer == layer]
        accepted = self._accepted_of(mode)
        measured = [measured_of(row, suite, accepted) for row in rows]
        return self.judge(suite, mode, measured, layer)

    def gradients(self, suite: str, mode: Mode, layer: str) -> Outcome:
        """The gradients of one layer in one mode."""
        rows = [row for row in self.bench.gradients(mode) if row.layer == layer]
        accepted = self._accepted_of(mode)
        return self.judge(suite, mode, [measured_of(r, suite, accepted) for r in rows], layer)

    def scaling(self, suite: str, fmt: str, layer: str) -> Outcome:
        """The scale of a format that suits each tensor of a layer, and the error at it."""
        known = self.ledger.accepted(fmt, False)
        exponents = {
            key.site: value
            for key, value in known.items()
            if (key.suite, key.scope, key.metric) == (suite, "sweep", "exponent")
        }
        same = self.ledger.same_device(fmt)

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
        accepted = self.ledger.accepted(fmt, False)
        rows = [replace(row, accepted=accepted_of(accepted, suite, row) or None) for row in rows]
        mode = Mode(fmt, "the format alone")
        return self.judge(suite, mode, rows, where, notes, title=fmt, label="format")

    def reference(self, suite: str) -> Outcome:
        """The stored reference is the live one, and that one is unquantized."""
        measured = []
        stored = [] if self.ledger.updating is not None else self.store.bases()
        for basis in stored:
            live = self.ledger.reference_tensors(basis)
            measured += stored_reference(self.bench, basis, self.store.reference(basis), live)
        if self.ledger.updating is not None:
            self.ledger.record_anew()
        elif not stored:
            raise QgateError(
                f"there is no baseline of {self.bench.model.name} in {str(self.store.folder)!r}: "
                f"{self._update_command()} records one."
            )
        places = {each.site: each for each in measured}
        measured = list(places.values()) + unquantized(self.bench)
        outcome = self.judge(suite, FP32, measured, "reference", title=FP32.name)
        if outcome.passed and not perturbation_shows(self.bench):
            text = "a weight moved by a thousandth does not show in the reference"
            return Outcome(outcome.verdict, text, 0, _red(outcome.record, text))
        return outcome

    def canary(self, suite: str) -> Outcome:
        """A quantizer that truncates is rejected: the gate can fail."""
        bench = self.bench
        healthy, broken = (apply(mode, bench.model) for mode in (HEALTHY, BROKEN))
        rows = {
            name: [
                measured_of(row, suite, {}, gated=())
                for row in bench.site_errors(quantized, healthy)
            ]
            for name, quantized in (("healthy", healthy), ("broken", broken))
        }
        seen = judge(rows["broken"], self.policy.limits_of("canary"), True)
        outcome = self.judge(suite, HEALTHY, rows["healthy"], "canary", title=HEALTHY.name)
        missed = seen.passed or all(check.kind != "budget" for check in seen.failed)
        text = "a quantizer that truncates passes the gate: it gates nothing" if missed else ""
        if not text and not identity(bench):
            text = "a plan that quantizes nothing changes the model's output"
        return Outcome(seen, text, 0, _red(outcome.record, text)) if text else outcome

    def task(self, suite: str, mode: Mode) -> Outcome:
        """How much worse the model does its work."""
        values, notes = task_values(self.bench, mode)
        accepted = self._accepted_of(mode)
        found = {k.metric: v for k, v in accepted.items() if (k.suite, k.site) == (suite, "logits")}
        measured = Measured(
            site="logits", layer="", scope="task", values=values, order=0,
            nonfinite=sum(not math.isfinite(v) for v in values.values()),
            accepted=found or None,
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
        """Hold numbers against their limits; in an update, note what is to be written.

        `title` names the accepted errors where they are not those of a mode.
        """
        title = title or self.ledger.title(mode)
        accepted = self.ledger.accepted(title, mode.calibrated)
        verdict = judge(
            measured,
            self.policy.limits_of(mode.name),
            self.ledger.same_device(title),
            absent=self._gone(accepted, suite, measured),
            metrics=SHARES,
        )
        updated, failed = self.ledger.collect(title, suite, mode.calibrated, verdict)
        text = self._text(verdict, failed, mode, title, label) if failed else ""
        rows = record_rows(suite, self.bench.model.name, mode.name, where, verdict, failed)
        if notes:
            rows = [{**row, "notes": dict(notes)} for row in rows]
        record = {"passed": not failed, "updated": updated, "title": title, "rows": rows}
        return Outcome(verdict, text, updated, record)

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

    def _accepted_of(self, mode: Mode) -> Mapping[Key, float]:
        return self.ledger.accepted(self.ledger.title(mode), mode.calibrated)

    def _gone(
        self, accepted: Mapping[Key, float], suite: str, measured: Sequence[Measured]
    ) -> set[tuple[str, str]]:
        """What was accepted in the layers and scopes measured here, and was not measured now."""
        layers, scopes = ({each.layer for each in measured}, {each.scope for each in measured})
        here = {each.key for each in measured}
        return {
            (key.site, key.scope)
            for key in accepted
            if key.suite == suite
            and key.scope in scopes
            and (key.site, key.scope) not in here
            and short_layer(self.bench.model.layer_of(key.site.partition(":")[0])) in layers
        }

    # What a run leaves ----------------------------------------------------------------------------

    def plans(self) -> dict[str, dict[str, str]]:
        """The plans of the modes that ran, site by site."""
        return {
            name: {entry.site: f"{entry.does}; {entry.origin}" for entry in made.plan.entries}
            for name, made in self.bench.ran().items()
        }

    def leave_candidate(self, folder: Path, outcome: Outcome, source: str) -> None:
        """What a failing gate measured, for `qgate baselines accept` to take.

        A gate that passes takes back what it left when it failed.
        """
        if outcome.passed:
            name = self.bench.model.name
            drop_candidate(folder, name, outcome.record["title"], source)
            return
        values: dict[Key, float] = {}
        barred: dict[Key, str] = {}
        mode = ""
        for row in outcome.record["rows"]:
            mode = row["mode"]
            for check in row["checks"]:
                if check["passed"] or check["value"] is None or not check["metric"]:
                    continue
                key = Key(row["suite"], row["site"], row["scope"], check["metric"])
                values[key] = check["value"]
                if check["kind"] not in ACCEPTABLE:
                    barred[key] = f"{check['kind']}: {check['reason'] or 'limit broken'}"
        if values:
            uses = mode in self.bench.ran() and self.bench.ran()[mode].mode.calibrated
            title = outcome.record["title"]
            candidate = Candidate(self.origin(uses), title, source, values, barred, uses)
            write_candidate(folder, candidate)

    def commit(self, dry_run: bool = False) -> list[StoredChange]:
        """Write what was collected, and return what changed; or only say what would."""
        update = self.ledger.finish()
        if update is None:
            return []
        return self.store.preview(update) if dry_run else self.store.commit(update)


def _shown(file: Path) -> str:
    """A path as seen from here, where it lies below."""
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)


def _red(record: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A record that failed as a whole, whatever its sites say."""
    rows = [{**row, "passed": False, "failure": text} for row in record["rows"][:1]]
    return {**record, "passed": False, "rows": [*rows, *record["rows"][1:]]}
