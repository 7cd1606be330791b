"""Gates of one model: its layers, gradients, formats, task, reference and canary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgate import formats, modes
from qgate.errors import QgateError, unknown
from qgate.gate.across_weights import NOT_ACROSS_WEIGHTS, REFERENCE
from qgate.gate.checks import Verdict, judge
from qgate.gate.ledger import Which, with_accepted
from qgate.gate.measured import Measured
from qgate.gate.measuring import late
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.canary import HEALTHY
from qgate.gate.measuring.model_subject import ModelSubject
from qgate.gate.measuring.own_code import own_code
from qgate.gate.measuring.site_errors import differs, more_error
from qgate.gate.measuring.suite_needs import SuiteNeeds
from qgate.gate.policy import Limits, Policy, room_for_few_tokens
from qgate.gate.sessions import GateSession, Outcome, Room, gate
from qgate.loading import LateModule
from qgate.models.task_metric import metric_name
from qgate.modes import Mode
from qgate.modes.formats import FP32
from qgate.results.kinds import Tier, scope_of
from qgate.results.pictures import LONG_TEXT
from qgate.results.schema import Record

if TYPE_CHECKING:
    from qgate.gate.measuring import diagnosing as diagnosing
    from qgate.gate.measuring import format_rows as format_rows
    from qgate.gate.measuring import self_checks as self_checks
    from qgate.gate.measuring import tasks as tasks
    from qgate.gate.measuring.diagnosing import SiteDiagnoses
else:
    diagnosing = LateModule("qgate.gate.measuring.diagnosing")
    format_rows = LateModule("qgate.gate.measuring.format_rows")
    self_checks = LateModule("qgate.gate.measuring.self_checks")
    tasks = LateModule("qgate.gate.measuring.tasks")


class ModelGates(GateSession):
    """Gates of one model; a copy with another policy shares everything else."""

    def __init__(self, bench: Bench, baselines: Path, policy: Policy, **options: Any) -> None:
        super().__init__(ModelSubject(bench), baselines, policy, **options)
        self.bench = bench
        self._made: list[SiteDiagnoses] = []
        self.needs = SuiteNeeds(bench)
        bench.pictures = self.plots != "none"

    @property
    def _diagnoses(self) -> SiteDiagnoses:
        """Return the diagnoses, which copies share; most runs have nothing to diagnose."""
        if not self._made:
            self._made.append(diagnosing.SiteDiagnoses(self.bench))
        return self._made[0]

    def diagnose(self, mode: Mode, verdict: Verdict) -> Mapping[tuple[str, str], str]:
        return self._diagnoses.of_verdict(mode, verdict)

    def explain_more_error(self, mode: Mode, verdict: Verdict) -> tuple[Room, Mapping[str, str]]:
        """Measure what attention in another right arithmetic adds to errors over accepted ones."""
        scopes = [check.about for check in verdict.failed]
        is_backward = all(scope.is_gradient for scope in scopes)
        if not scopes or not (is_backward or all(scope.has_grades for scope in scopes)):
            return {}, {}
        if not all(check.limit.is_accepted for check in verdict.failed):
            return {}, {}
        rows, words = self.bench.with_reference_attention(mode, gradients=is_backward)
        less = {row.key: row for row in rows}
        pairs = [(less[row.key], row) for row in verdict.measured if row.key in less]
        room = {row.key: more_error(by_reference, row) for by_reference, row in pairs}
        note = f"not computed as by the reference's code, and right: {words}"
        return room, {"attention": note} if room else {}

    def code_of(self, mode: Mode, row: Record) -> str:
        scope = scope_of(row["scope"])
        if scope.tier is not Tier.LOCAL:
            return ""
        model = self.bench.quantized(mode).model if mode.own else self.bench.model
        return own_code(model.module, row["site"], is_before=scope.against_noise)

    def leave_reproduction(self, folder: Path, outcome: Outcome) -> Path | None:
        for row in outcome.record["rows"]:
            reproduction = self._diagnoses.reproduction(row["mode"], row["site"])
            if reproduction is None or row["passed"] or not scope_of(row["scope"]).is_local:
                continue
            title = (
                f"{row['site']}, mode {row['mode']} of {row['model']}: {row['finding']['fault']}"
            )
            if (path := reproduction.write(folder, title)) is not None:
                row["reproduction"] = path.name
            return path
        return None

    # Before anything is compared ------------------------------------------------------------------

    def check_policy(self, policy: Policy | None = None) -> None:
        checked = policy or self.policy
        names = [site.name for site in self.bench.model.sites()]
        metric = self.bench.model.metric
        own = [] if metric is None else [metric_name(metric)]
        checked.check_sites([*names, "logits", LONG_TEXT, *own])
        of_model = (*self.bench.model.modes, *self.bench.setup.modes)
        mode_names = [*modes.names(), *of_model, *formats.names(), HEALTHY.name]
        checked.check_modes(mode_names, formats.unlisted_names())

    def mode_named(self, name: str) -> Mode:
        return self.bench.mode(name)

    def title_of(self, mode: str, fmt: str) -> tuple[str, bool] | None:
        if mode:
            return self.subject.title(mode), self.bench.mode(mode).calibrated
        return (fmt, False) if fmt else None

    def prepare(self, mode: str) -> None:
        """Resolve a mode, its scales and its accepted errors: what fails here is no verdict."""
        named = self.bench.mode(mode)
        if self.ledger.updating is None:
            self.ledger.accepted(self.subject.title(mode), named.calibrated)
        if reason := self.misfit(named):
            raise QgateError(reason)
        self.bench.quantized(named)

    def misfit(self, mode: Mode) -> str:
        """Say why a mode cannot be compared with the reference chosen; empty where it can."""
        if misfit := modes.misfit_of(mode, self.bench.model):
            return misfit
        if mode.rules and not any(site.is_product for site in self.bench.model.sites()):
            try:
                modes.make_plan(mode, self.bench.model)
            except QgateError as error:
                return str(error)
        basis = self.bench.reference_basis()
        own = self.bench.model.basis if mode.own else mode.basis
        if basis is None or basis == own:
            return ""
        return (
            f"mode {mode.name!r} is in basis {own!r}, and the reference "
            f"{self.bench.reference_mode!r} in {basis!r}: choose modes of one basis, or "
            "--reference fp32."
        )

    def has_accepted(self, suite: str, title: str) -> bool:
        """Tell if figures of a suite are accepted under a title, stale or not."""
        try:
            accepted = self.store.accepted_on(title, self.bench.model.device.type)
        except QgateError:
            return False
        return any(key.suite == suite for of in accepted.values() for key in of.values)

    # The gates ------------------------------------------------------------------------------------

    @gate
    def layer(self, suite: str, mode: Mode, layer: str) -> Outcome:
        """Judge the errors of one layer in one mode."""
        return self._of_layer(suite, mode, layer, self.bench.measure, self._not_isolated)

    @gate
    def outputs(self, suite: str, mode: Mode) -> Outcome:
        """Judge the outputs of the model in one mode, and what lies outside its blocks."""
        rows = [row for row in self.bench.measure(mode) if not row.layer]
        notes = self._not_isolated(mode)
        outcome = self.judge(suite, mode, rows, "outputs", notes, whole=("",))
        blind = self._blind_kind(mode) if outcome.passed else ""
        return outcome.failed_as_whole(blind) if blind else outcome

    def _blind_kind(self, mode: Mode) -> str:
        """Say which kind of limit in force lets a planted fault of a mode pass; empty if none."""
        accepted = self.ledger.accepted(self.subject.title(mode.name), mode.calibrated)
        same, across = self.ledger.same_device(accepted), bool(accepted.other_weights)
        limits = self.policy.limits_of(mode.name, across)
        changed = [row for row in self.bench.measure(mode) if differs(row)]
        carried = [row for row in changed if row.about.over_tokens]
        rows = [row for row in carried if row.layer] or carried
        share = self_checks.MORE_ERROR_ELSEWHERE
        if same and not across:
            room = max((room_for_few_tokens(row.carried_tokens) for row in rows), default=1.0)
            share = self_checks.MORE_ERROR * room
        if not _is_seen(self_checks.worse_blocks(rows, share), limits, same, "regression"):
            return (
                f"an error {share:.0%} over the accepted one passes in every block of mode "
                f"{mode.name}: its limits on regressions gate nothing. Look at `regression` and "
                "`atol` in settings and markers."
            )
        if not _is_seen(self.bench.canary_rows[1], limits, True, "budget"):
            return (
                f"a quantizer that truncates passes under the limits of mode {mode.name}: its "
                "budget gates nothing. Look at `budget_db` in settings and markers."
            )
        return ""

    @gate
    def gradients(self, suite: str, mode: Mode, layer: str) -> Outcome:
        """Judge the gradients of one layer in one mode."""
        return self._of_layer(suite, mode, layer, self.bench.gradients)

    def _not_isolated(self, mode: Mode) -> Mapping[str, str]:
        """Return the places of a mode without an isolated error, with what stands in for it."""
        left_out = self.bench.not_isolated(mode).items()
        return {f"isolated error of {site}": reason for site, reason in left_out}

    def _of_layer(
        self,
        suite: str,
        mode: Mode,
        layer: str,
        measure: Callable[[Mode], list[Measured]],
        notes: Callable[[Mode], Mapping[str, str]] = lambda _mode: {},
    ) -> Outcome:
        if layer not in self.bench.layers:
            raise unknown(f"layer of {self.bench.model.name}", layer, self.bench.layers)
        rows = [row for row in measure(mode) if row.layer == layer]
        return self.judge(suite, mode, rows, layer, notes(mode))

    @gate
    def scaling(self, suite: str, fmt: str, layer: str) -> Outcome:
        """Judge the scale of a format that suits each tensor of a layer, and the error at it."""
        accepted = self.ledger.accepted(fmt, False)
        exponents = {
            site: float(values["exponent"])
            for (of, site, scope), values in accepted.by_site.items()
            if (of, scope) == (suite, "sweep") and "exponent" in values
        }
        same, across = self.ledger.same_device(accepted), bool(accepted.other_weights)
        exponents = {} if across else exponents

        def tolerance(site: str) -> float:
            return self.policy.limits_for(site, fmt, "sweep").tolerance(same)

        rows, notes = format_rows.scaling_rows(self.bench, fmt, layer, exponents, tolerance, same)
        mode = Mode(fmt, "the format alone")
        return self.judge(suite, mode, rows, layer, notes, title=fmt, label="format")

    @gate
    def overflow(self, suite: str, fmt: str, layer: str, phase: str = "forward") -> Outcome:
        """Judge what a format saturates and flushes in the tensors or gradients of a layer."""
        rows = format_rows.overflow_rows(self.bench, fmt, layer, phase)
        mode = Mode(fmt, "the format alone")
        return self.judge(suite, mode, rows, f"{layer} {phase}", {}, title=fmt, label="format")

    @gate
    def reference(self, suite: str) -> Outcome:
        """Judge whether the stored reference is the live one, and that one is unquantized.

        An update records it where there is none, where it is of something else, or out of its
        noise; one that only adds leaves it alone, and so does one on another kind of device.
        """
        which, misfits = self.ledger.updating, self.ledger.misfits()
        stored = [] if misfits else self.store.bases()
        if which is None and not stored and not misfits:
            raise QgateError(
                f"there is no baseline of {self.bench.model.name} in {str(self.store.folder)!r}: "
                f"{self.update_command()} records one."
            )
        rows = {row.site: row for basis in stored for row in self._stored(basis, which)}
        limits = self.policy.limits_of(FP32.name)
        moved = not rows or not judge(list(rows.values()), limits, True).passed
        anew = which is not None and ((moved and which != "new") or not stored or which == "all")
        if stored and self.ledger.is_other_kind:
            anew = False
        measured = [] if anew and not self.dry_run else list(rows.values())
        measured += self_checks.unquantized(self.bench)
        notes = {NOT_ACROSS_WEIGHTS: [REFERENCE]} if misfits and which is None else None
        if notes:
            self.note_left_out(notes[NOT_ACROSS_WEIGHTS])
        outcome = self.judge(suite, FP32, measured, "reference", notes, title="fp32")
        if outcome.passed and (unread := self_checks.unread_weight(self.bench)):
            return outcome.failed_as_whole(
                f"a weight moved by a hundredth does not show in the reference: {unread} does not "
                "read what its state names as its weight"
            )
        if not anew or self.dry_run:
            return outcome
        decision = replace(outcome.decision, anew=True)
        if not self.deferred:
            self.keep(replace(outcome, decision=decision))
        record = {**outcome.record, "updated": int(moved)}
        return replace(outcome, record=record, decision=decision)

    def _stored(self, basis: str, which: Which | None) -> list[Measured]:
        live = self.subject.references(basis)
        try:
            return self_checks.stored_reference(
                self.bench, basis, self.store.reference(basis), live
            )
        except QgateError:
            if which in (None, "new"):
                raise
            return []

    @gate
    def canary(self, suite: str) -> Outcome:
        """Judge whether a quantizer that truncates is rejected: the gate can fail."""
        bench = self.bench
        good, bad = bench.canary_rows
        outcome = self.judge(suite, HEALTHY, good, "canary", title=HEALTHY.name)
        if not _is_seen(bad, self.policy.limits_of(HEALTHY.name), True, "budget"):
            return outcome.failed_as_whole(
                "a quantizer that truncates passes the gate: it gates nothing"
            )
        if not self_checks.identity(bench):
            return outcome.failed_as_whole(
                "a plan that quantizes nothing changes the model's output"
            )
        return outcome

    @gate
    def task(self, suite: str, mode: Mode) -> Outcome:
        """Judge how much worse the model does its work."""
        row, notes, summary = tasks.task_row(self.bench, mode)
        self.tasks.append(summary)
        accepted = self.ledger.accepted(self.subject.title(mode.name), mode.calibrated)
        before = with_accepted(row, accepted.by_site.get((suite, row.site, row.scope), {}))
        if before.accepted_samples() and not before.parts:
            raise QgateError(
                f"metric {row.site} of {self.bench.model.name} returned one number for all "
                f"samples, and figures of {len(before.accepted_samples())} samples are accepted: "
                "return one for each, or give the metric another name to record it anew."
            )
        rows = [row]
        if mode.states is not None:
            quantized = self.bench.quantized(mode).model
            rows.append(
                late.long_texts.long_text_row(
                    self.bench.model, quantized, self.bench.long_reference
                )
            )
        return self.judge(suite, mode, rows, row.site, notes, whole=("",))


def _is_seen(
    planted: list[Measured], limits: Callable[[Measured], Limits], same: bool, kind: str
) -> bool:
    return any(check.kind == kind for check in judge(planted, limits, same).failed)
