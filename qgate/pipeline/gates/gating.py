"""One model under the gate: what was measured is held against what was accepted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qgate import formats, modes
from qgate.errors import QgateError, unknown
from qgate.gate import Measured, Policy, judge
from qgate.gate.updating import Which
from qgate.modes import Mode, apply
from qgate.modes.formats import FP32
from qgate.pipeline.gates.bench import Bench
from qgate.pipeline.gates.format_rows import overflow_rows, scaling_rows
from qgate.pipeline.gates.judging import Judging, Outcome
from qgate.pipeline.gates.rows import measured_of
from qgate.pipeline.gates.self_checks import (
    BROKEN,
    HEALTHY,
    identity,
    perturbation_shows,
    stored_reference,
    unquantized,
)
from qgate.pipeline.gates.subjects import ModelSubject
from qgate.pipeline.gates.tasks import task_values

if TYPE_CHECKING:
    from qgate.storage.places import Place


class GateSession(Judging):
    """The gates of one model. A copy with another policy shares everything else."""

    def __init__(self, bench: Bench, baselines: Place, policy: Policy, **how: Any) -> None:
        super().__init__(ModelSubject(bench), baselines, policy, **how)
        self.bench = bench
        bench.pictures = self.plots != "none"

    # Before anything is compared ------------------------------------------------------------------

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
            site: float(found["exponent"])
            for (of, site, scope), found in known.by_site.items()
            if (of, scope) == (suite, "sweep") and "exponent" in found
        }
        same = self.ledger.same_device(known)

        def tolerance(site: str) -> float:
            return self.policy.limits_for(site, fmt, "sweep").tolerance(same)

        rows, notes = scaling_rows(self.bench, fmt, layer, exponents, tolerance, same)
        return self._of_format(suite, fmt, rows, layer, notes)

    def overflow(self, suite: str, fmt: str, layer: str, phase: str) -> Outcome:
        """Gate what a format saturates and flushes in the tensors or gradients of a layer."""
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
            name: [
                measured_of(row, gated=())
                for row in bench.site_errors(quantized, healthy, pictures=quantized is healthy)
            ]
            for name, quantized in (("healthy", healthy), ("broken", broken))
        }
        limits = self.policy.limits_of(HEALTHY.name)
        seen = judge(rows["broken"], limits, True)
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

    # What a run leaves ----------------------------------------------------------------------------

    def plans(self) -> dict[str, dict[str, str]]:
        """The plans of the modes that ran, site by site."""
        return {
            name: {entry.site: f"{entry.does}; {entry.origin}" for entry in made.plan.entries}
            for name, made in self.bench.ran().items()
        }


def _red(outcome: Outcome, text: str) -> Outcome:
    """An outcome that failed as a whole, whatever its sites say."""
    first, *rest = outcome.record["rows"]
    rows = [{**first, "passed": False, "failure": text}, *rest]
    record = {**outcome.record, "passed": False, "updated": 0, "rows": rows}
    return Outcome(outcome.verdict, text, record, replace(outcome.decision, values={}, drops=()))
