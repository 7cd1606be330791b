"""One model under the gate: what was measured is held against what was accepted."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from qgate.baselines import (
    Candidate,
    Key,
    Origin,
    ReferenceTensor,
    Store,
    Update,
    accepted_file,
    differences,
    write_candidate,
)
from qgate.baselines import Change as StoredChange
from qgate.errors import QgateError
from qgate.gate import Measured, Policy, Verdict, decide_update, failure_text, judge
from qgate.gate.checks import ACCEPTABLE
from qgate.models.model import inputs_hash
from qgate.modes import Mode, apply
from qgate.modes.formats import FP32
from qgate.pipeline.bench import Bench
from qgate.pipeline.format_rows import SHARES, overflow_rows, scaling_rows
from qgate.pipeline.gate_rows import accepted_of, measured_of, record_rows
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

REFERENCE_CAP = 1 << 17


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
    """The gates of one model; accepted errors are read once, updates collected till the end."""

    bench: Bench
    baselines: Path
    policy: Policy
    updating: str | None = None
    report: str = ""
    _update: Update | None = None
    _origin: Origin | None = None
    _accepted: dict[str, Mapping[Key, float]] = field(default_factory=dict)
    _rerecord: bool = False

    def shares(self, other: GateSession) -> None:
        """Collect updates where another session of the same model does."""
        self._update = other.pending() if self.updating is not None else None
        self._accepted, self._origin = other._accepted, other._origin

    @property
    def store(self) -> Store:
        return Store(self.baselines, self.bench.model.name)

    def origin(self, calibrated: bool = False) -> Origin:
        """What this run measures, and with what."""
        if self._origin is None:
            model, sampling = self.bench.model, self.bench.setup.sampling
            self._origin = Origin(
                model=model.name,
                weights=model.weights_hash(),
                inputs=inputs_hash(model.inputs),
                calibration=None,
                samples=len(model.inputs),
                seqlen=sampling.seqlen,
                seed=sampling.seed,
                device=model.device.type,
                torch=str(torch.__version__),
                commit=_commit(),
            )
        if calibrated:
            return Origin(**{**vars(self._origin), "calibration": self._calibration_hash()})
        return self._origin

    def _calibration_hash(self) -> str:
        made = self.bench.calibration
        return f"{made.inputs[:40]}-{made.settings.percentile_alpha:g}-{made.settings.arithmetic}"

    def check_baseline(self) -> None:
        """Refuse to compare with a baseline of something else; an update replaces it instead."""
        if self.updating is not None:
            return
        recorded = self.store.origin()
        if recorded is None:
            return
        now = self.origin()
        fields = ("model", "weights", "samples", "seqlen", "inputs")
        found = differences(recorded, now, fields)
        if found:
            raise QgateError(
                "; ".join(found) + ". Refresh it on purpose with --update-baselines, or run what "
                f"it was made with ({self.store.folder})."
            )

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
        """The error of a format at the scale that suits each tensor of a layer."""
        rows, notes = scaling_rows(self.bench, fmt, layer)
        return self._of_format(suite, fmt, rows, layer, notes)

    def overflow(self, suite: str, fmt: str, layer: str, phase: str) -> Outcome:
        """What a format clips and makes zero in the tensors or gradients of a layer."""
        rows = overflow_rows(self.bench, fmt, layer, phase)
        return self._of_format(suite, fmt, rows, f"{layer} {phase}", {})

    def _of_format(
        self, suite: str, fmt: str, rows: list[Measured], where: str, notes: Mapping[str, Any]
    ) -> Outcome:
        mode = Mode(fmt, "the format alone")
        accepted = self._accepted_of(mode)
        rows = [replace(row, accepted=accepted_of(accepted, suite, row) or None) for row in rows]
        return self.judge(suite, mode, rows, where, notes, label="format")

    def reference(self, suite: str) -> Outcome:
        """The stored reference is the live one, and that one is unquantized."""
        measured = []
        stored = [] if self.updating is not None else self.store.bases()
        for basis in stored:
            live = self.reference_tensors(basis)
            measured += stored_reference(self.bench, basis, self.store.reference(basis), live)
        if not stored and self.updating is None:
            raise QgateError(
                f"there is no baseline of {self.bench.model.name} in {str(self.store.folder)!r}: "
                f"pytest suites --model {self.bench.setup.model} --update-baselines records one."
            )
        if self.updating is not None:
            self.pending()
            self._rerecord = True
        places = {each.site: each for each in measured}
        measured = list(places.values()) + unquantized(self.bench)
        outcome = self.judge(suite, FP32, measured, "reference")
        if outcome.passed and not perturbation_shows(self.bench):
            text = "a weight moved by a thousandth does not show in the reference"
            return Outcome(outcome.verdict, text, 0, {**outcome.record, "passed": False})
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
        limits = self.policy.limits_of("canary")
        seen = judge(rows["broken"], limits, True)
        outcome = self.judge(suite, HEALTHY, rows["healthy"], "canary")
        missed = seen.passed or all(check.kind != "budget" for check in seen.failed)
        text = "a quantizer that truncates passes the gate: it gates nothing" if missed else ""
        if not text and not identity(bench):
            text = "a plan that quantizes nothing changes the model's output"
        if text:
            return Outcome(seen, text, 0, {**outcome.record, "passed": False})
        return outcome

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
        label: str = "mode",
    ) -> Outcome:
        """Hold numbers against their limits; in an update, note what is to be written."""
        accepted = self._accepted_of(mode)
        gone = self._gone(accepted, suite, measured)
        file = self.store.folder / accepted_file(mode.name)
        verdict = judge(
            measured,
            self.policy.limits_of(mode.name),
            self._same_device(mode),
            absent=gone,
            metrics=SHARES,
        )
        updated = 0
        failed = verdict.failed
        if self.updating is not None:
            decided = decide_update(verdict, self.updating)  # type: ignore[arg-type]
            for (site, scope, metric), value in decided.values.items():
                self.pending().set_accepted(mode.name, Key(suite, site, scope, metric), value)
            if not mode.calibrated:
                self.pending().without_calibration(mode.name)
            updated = len(decided.values)
            failed = decided.remaining
        command = (
            f"pytest suites --model {self.bench.setup.model} --mode {mode.name} --update-baselines"
        )
        text = ""
        if failed:
            text = failure_text(
                Verdict(verdict.measured, tuple(sorted(failed, key=lambda each: each.place))),
                mode.name,
                label=label,
                baseline=str(file),
                command=command,
                report=self.report,
            )
        rows = record_rows(suite, self.bench.model.name, mode.name, where, verdict, failed)
        if notes:
            rows = [{**row, "notes": dict(notes)} for row in rows]
        record = {"passed": not failed, "updated": updated, "rows": rows}
        return Outcome(verdict, text, updated, record)

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

    def plans(self) -> dict[str, dict[str, str]]:
        """The plans of the modes that ran, site by site."""
        return {
            name: {entry.site: f"{entry.does}; {entry.origin}" for entry in made.plan.entries}
            for name, made in self.bench.ran().items()
        }

    def leave_candidate(self, folder: Path, outcome: Outcome, source: str) -> None:
        """What a failing gate measured, for `qgate baselines accept` to take."""
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
            candidate = Candidate(self.origin(uses), mode, source, values, barred, uses)
            write_candidate(folder, candidate)

    def pending(self) -> Update:
        """The update that is collected."""
        if self._update is None:
            self._update = Update(self.origin(calibrated=self._uses_calibration()))
        return self._update

    def _uses_calibration(self) -> bool:
        return "rotated" in self.bench.model.bases

    def commit(self, dry_run: bool = False) -> list[StoredChange]:
        """Write what was collected, with the references where they are new or of other weights."""
        if self._update is None:
            return []
        update, recorded = self._update, self.store.origin()
        fields = ("model", "weights", "samples", "seqlen", "inputs")
        if self._rerecord or recorded is None or differences(recorded, update.origin, fields):
            for basis in ("plain", *self.bench.model.bases):
                update.set_reference(basis, self.reference_tensors(basis))
        self._update = None
        return self.store._planned(update)[1] if dry_run else self.store.commit(update)

    def reference_tensors(self, basis: str) -> dict[str, ReferenceTensor]:
        """The outputs of all blocks and the logits, cut to a seeded sample of rows."""
        return {
            site: ReferenceTensor.of(
                torch.cat([t.reshape(-1, t.shape[-1]) for t in tensors]).numpy(), REFERENCE_CAP
            )
            for site, tensors in self.bench.reference(basis).tensors.items()
            if not site.endswith(":input")
        }

    def _accepted_of(self, mode: Mode) -> Mapping[Key, float]:
        if mode.name not in self._accepted:
            found = self.store.accepted(mode.name)
            values: Mapping[Key, float] = {}
            if found is not None:
                stale = found.stale(self.origin(calibrated=mode.calibrated))
                if stale and self.updating is None:
                    raise QgateError(
                        f"the accepted errors of mode {mode.name} are stale: {'; '.join(stale)}. "
                        f"Refresh them with --mode {mode.name} --update-baselines."
                    )
                values = {} if stale else found.values
            self._accepted[mode.name] = values
        return self._accepted[mode.name]

    def _same_device(self, mode: Mode) -> bool:
        found = self.store.accepted(mode.name)
        return found is None or found.device == self.origin().device


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
