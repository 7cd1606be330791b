"""Gates of a quantized checkpoint: its weights beside its parent's, its tensors, and its recipe.

Findings are held at none. A rule that says why may allow some at sites by name; an update of the
accepted errors never does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from qgate.baselines import Origin
from qgate.checkpoints.calibrated_scales import open_calibration
from qgate.checkpoints.comparison import CheckpointPair, check_alike, open_pair
from qgate.checkpoints.methods.explanations import settle_methods
from qgate.checkpoints.recipe_texts import bits_per_weight, fold_numbers, plan_texts, recipe_text
from qgate.checkpoints.record import CheckpointFinding, CheckpointRecord, WeightRecord
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.errors import QgateError, unknown
from qgate.gate.measured import Measured
from qgate.gate.policy import FINDINGS, Policy
from qgate.gate.sessions import GateSession, Outcome, gate
from qgate.gate.subjects import OUTSIDE, Subject, commit_here, layer_order
from qgate.modes import Mode

WEIGHTS, ACCOUNTING, RECIPE = "weights", "accounting", "recipe"
"""Names of the accepted records, and of the gates in what people read."""
SCOPE = "checkpoint"
PLAN = "quantizer"
_ERRORS = ("over_ideal_db", "relative_mse")
_NOISE = 1e-13
"""Relative error that rounding in float32 makes of equal values."""
_SAMPLED = 5
"""Weights that are compared before any test runs, to tell a pair from none."""
Judged = tuple[WeightRecord, list[CheckpointFinding]]


class CheckpointSubject(Subject):
    """Quantized checkpoint and its parent under a name, with the options that name them."""

    def __init__(
        self,
        child: str,
        parent: str | None,
        name: str,
        options: Sequence[tuple[str, ...]] = (),
        recipe: str | None = None,
        layout: str | None = None,
        calibration: str | None = None,
    ) -> None:
        self.layout, self.calibration_dump = layout, calibration
        self.child, self.parent, self.name, self.recipe = child, parent, name, recipe
        default = [("checkpoint", child), *([("parent", parent)] if parent is not None else [])]
        self.options = list(options) or default
        self._judged: dict[str, Judged] = {}
        self._named: dict[str, Judged] = {}

    def origin(self) -> Origin:
        return Origin.of_subject("checkpoint", self.name, str(torch.__version__), commit_here())

    def layer_of(self, site: str) -> str:
        return layer_in(site)

    @cached_property
    def pair(self) -> CheckpointPair:
        """Open the pair; an error if it cannot be read, or is none by names or by values."""
        pair = open_pair(self.child, self.parent, self.recipe, self.layout)
        quantized = [weight for weight in pair.weights if weight.packing and self.parent]
        sample = CheckpointRecord(self.child, self.parent, pair.recipe.method)
        for weight in sorted(quantized, key=lambda weight: weight.size)[:_SAMPLED]:
            self._judged[weight.name] = pair.judge(weight)
            sample.weights.append(self._judged[weight.name][0])
            sample.findings += self._judged[weight.name][1]
        check_alike(sample, self.layout)
        return pair

    @cached_property
    def layers(self) -> list[str]:
        return sorted({layer_in(weight.name) for weight in self.pair.weights}, key=layer_order)

    def judged(self, weight: StoredWeight) -> Judged:
        """Compare a weight with what is declared and with its parent, once."""
        if weight.name not in self._judged:
            self._judged[weight.name] = self.pair.judge(weight)
        if weight.name not in self._named:
            self._named[weight.name] = self.pair.with_source(self._judged[weight.name])
        return self._named[weight.name]

    def judged_layer(self, layer: str) -> list[Judged]:
        """Judge the weights of a layer, and excuse those that undo what was done to others."""
        record = CheckpointRecord(self.child, self.parent, self.pair.recipe.method)
        for weight in self.pair.weights:
            if layer_in(weight.name) == layer:
                judged, findings = self.judged(weight)
                record.weights.append(judged)
                record.findings += findings
        settle_methods(record)
        by_name: dict[str, list[CheckpointFinding]] = {}
        for finding in record.findings:
            by_name.setdefault(finding.subject, []).append(finding)
        return [(weight, by_name.get(weight.name, [])) for weight in record.weights]

    @cached_property
    def accounting(self) -> list[CheckpointFinding]:
        """Find what is missing, unexpected, left out, cannot be fused, or loses activations."""
        record = CheckpointRecord(self.child, self.parent, self.pair.recipe.method)
        dump = self.calibration_dump
        self.pair.account(record, None if dump is None else open_calibration(dump))
        return fold_findings(record.findings)

    @cached_property
    def formats(self) -> list[WeightRecord]:
        """Describe how each weight is stored; those that were not judged are decoded for it."""
        alone = replace(self.pair, parent=None, matches={})
        return [
            (self._judged.get(weight.name) or alone.judge(weight))[0]
            for weight in self.pair.weights
        ]

    def sites(self) -> list[str]:
        """List all sites that a rule or marker may name."""
        names = [weight.name for weight in self.pair.weights]
        subjects = [finding.subject for finding in self.accounting]
        return list(dict.fromkeys([*map(site_of, names), *subjects, *map(fold_numbers, names)]))


class CheckpointGates(GateSession):
    """Gates of one quantized checkpoint."""

    subject: CheckpointSubject

    def __init__(
        self, subject: CheckpointSubject, baselines: Path, policy: Policy, **options: Any
    ) -> None:
        declared = policy.without_findings(SCOPE, "gates of checkpoints")
        super().__init__(subject, baselines, declared, **options)

    # Before anything is compared ------------------------------------------------------------------

    def check_parent(self) -> None:
        """Refuse accepted errors beside a parent where none is given."""
        if self.subject.parent is not None or self.ledger.updating is not None:
            return
        if self._accepted_sites:
            raise QgateError(
                f"the accepted errors of {self.subject.name} are beside a parent: give "
                f"{self.spelled('parent')} PARENT, or another {self.spelled('checkpoint-name')}."
            )

    @cached_property
    def _accepted_sites(self) -> set[tuple[str, str]]:
        """List the suites and sites that have accepted errors."""
        accepted = self.store.accepted_of(self.store.modes()).get(WEIGHTS)
        return {(key.suite, key.site) for key in (accepted.values if accepted else ())}

    def check_policy(self, policy: Policy | None = None) -> None:
        """Refuse a marker, or a rule for this checkpoint by name, that fits no site or gate."""
        narrow = (policy or self.policy).own()
        narrow.check_sites(self.subject.sites())
        narrow.check_modes([WEIGHTS, ACCOUNTING, RECIPE])

    def layers(self, suite: str) -> list[str]:
        """List the layers of the checkpoint, and those that a suite has accepted errors of."""
        gone = {layer_in(site) for of, site in self._accepted_sites if of == suite}
        return sorted({*self.subject.layers, *gone}, key=layer_order)

    # The gates ------------------------------------------------------------------------------------

    @gate
    def weights(self, suite: str, layer: str) -> Outcome:
        """Judge the weights of a layer: findings, and errors beside the accepted ones."""
        if layer not in self.layers(suite):
            about = f"layer of the checkpoint {self.subject.name}"
            raise unknown(about, layer, self.layers(suite))
        grouped: dict[str, list[Judged]] = {}
        for judged in self.subject.judged_layer(layer):
            grouped.setdefault(self._site_of(suite, judged[0]), []).append(judged)
        rows = [
            _weight_row(site, layer, order, members)
            for order, (site, members) in enumerate(grouped.items())
        ]
        return self._judge(suite, Mode(WEIGHTS, "the weights as they are stored"), rows, layer)

    def _site_of(self, suite: str, weight: WeightRecord) -> str:
        """Name the site of a weight; one that lost the errors that were accepted is another."""
        site = site_of(weight.name)
        is_measured = weight.figures is not None and weight.figures.over_ideal_db is not None
        if is_measured or (suite, site) not in self._accepted_sites:
            return site
        return f"{site} as {weight.format or 'it is stored'}"

    @gate
    def accounting(self, suite: str) -> Outcome:
        """Judge what is missing, unexpected, left out or ignored in vain."""
        pair, findings = self.subject.pair, self.subject.accounting
        values = {FINDINGS: 0.0, "tensors": float(len(pair.weights))}
        if pair.parent is not None:
            values["matched"] = float(len(pair.matches))
        rows = [_row("tensors", OUTSIDE, 0, values)]
        rows += [
            _row(finding.subject, OUTSIDE, order, {FINDINGS: 1.0}, why={FINDINGS: finding.cause})
            for order, finding in enumerate(findings, 1)
        ]
        return self._judge(suite, Mode(ACCOUNTING, "the tensors by name"), rows, OUTSIDE)

    @gate
    def recipe(self, suite: str) -> Outcome:
        """Judge the format of every weight and the bits of all, against the accepted ones."""
        weights = self.subject.formats
        texts = {"declared recipe": recipe_text(self.subject.pair.recipe), **plan_texts(weights)}
        rows = [
            _row(site, OUTSIDE, order, {FINDINGS: 0.0}, texts={PLAN: text}, gated=(PLAN,))
            for order, (site, text) in enumerate(texts.items())
        ]
        bits = {FINDINGS: 0.0, "bits_per_weight": bits_per_weight(weights)}
        gated = {"gated": ("bits_per_weight",), "why": {"bits_per_weight": ""}}
        rows.append(_row("all weights", OUTSIDE, len(rows), bits, **gated))
        return self._judge(suite, Mode(RECIPE, "the formats of all weights"), rows, OUTSIDE)

    def _judge(self, suite: str, mode: Mode, rows: Sequence[Measured], layer: str) -> Outcome:
        subject = self.subject
        notes = {"checkpoint": subject.child}
        notes |= {} if subject.parent is None else {"parent": subject.parent}
        return self.judge(suite, mode, rows, layer, notes, label=SCOPE, whole=[layer])


def _weight_row(site: str, layer: str, order: int, members: Sequence[Judged]) -> Measured:
    """Return one weight, or all experts of one projection: the worst and the mean of them."""
    figures = [record.figures for record, _ in members if record.figures is not None]
    over, errors = _known(f.over_ideal_db for f in figures), _known(f.error for f in figures)
    findings = fold_findings([finding for _, listed in members for finding in listed])
    values: dict[str, float | None] = {FINDINGS: float(len(findings))}
    if over:
        values |= {"over_ideal_db": max(over), "relative_mse": sum(errors) / len(errors)}
    if figures:
        values |= {
            "zero_share": max(f.zero_share for f in figures),
            "at_ends_share": max(f.at_ends_share for f in figures),
            "scale_smallest": min(_known(f.scales.smallest for f in figures), default=None),
            "scale_largest": max(_known(f.scales.largest for f in figures), default=None),
        }
    causes = [
        finding.cause if finding.subject == site else f"{finding.subject}: {finding.cause}"
        for finding in findings
    ]
    return _row(
        site,
        layer,
        order,
        values,
        floor=_NOISE,
        gated=_ERRORS if over else (),
        why={FINDINGS: "; ".join(causes), **dict.fromkeys(_ERRORS, "")},
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _row(
    site: str, layer: str, order: int, values: Mapping[str, float | None], **more: Any
) -> Measured:
    return Measured(
        site=site, layer=layer, scope=SCOPE, values=values, order=order, nonfinite=0, **more
    )


# The command -----------------------------------------------------------------------------------


def allow_findings(record: CheckpointRecord, policy: Policy) -> None:
    """Move what a rule of limits allows from the findings to the notes, as gates pass it."""
    declared = policy.without_findings(SCOPE, "gates of checkpoints")
    names = {weight.name for weight in record.weights}
    by_site: dict[str, list[CheckpointFinding]] = {}
    of_accounting: list[CheckpointFinding] = []
    for finding in record.findings:
        is_weight = finding.subject in names
        (by_site.setdefault(site_of(finding.subject), []) if is_weight else of_accounting).append(
            finding
        )
    groups = [(WEIGHTS, site, members) for site, members in by_site.items()]
    groups += [(ACCOUNTING, _folded(members).subject, members) for members in _alike(of_accounting)]
    for mode, site, members in groups:
        bound = declared.limits_for(site, mode, SCOPE).absolute[FINDINGS]
        if bound.holds(float(len(_alike(members)))):
            record.findings = [finding for finding in record.findings if finding not in members]
            why = f": {bound.reason}" if bound.reason else ""
            record.notes += [
                f"allowed by {bound.source}{why}: {finding.subject}: {finding.cause}"
                for finding in members
            ]


# Names --------------------------------------------------------------------------------------------


def layer_in(name: str) -> str:
    """Return the name up to its first number, `outside` where it has none."""
    match = re.match(r"((?:[^.]*\.)*?\d+)(?:\.|$)", name)
    return match[1] if match else OUTSIDE


def site_of(name: str) -> str:
    """Return the name of a weight, with all experts of a layer under one name."""
    return re.sub(r"(?<=experts\.)\d+(?=\.)", "*", name)


def fold_findings(findings: Sequence[CheckpointFinding]) -> list[CheckpointFinding]:
    """Fold findings of one cause whose subjects differ in numbers alone."""
    return [_folded(members) for members in _alike(findings)]


def _alike(findings: Iterable[CheckpointFinding]) -> list[list[CheckpointFinding]]:
    groups: dict[tuple[str, str], list[CheckpointFinding]] = {}
    for finding in findings:
        groups.setdefault((fold_numbers(finding.subject), finding.cause), []).append(finding)
    return [*groups.values()]


def _folded(members: Sequence[CheckpointFinding]) -> CheckpointFinding:
    first = members[0]
    if len(members) == 1:
        return first
    return CheckpointFinding(
        fold_numbers(first.subject),
        f"{first.cause} ({len(members):,} of that name, the first is {first.subject})",
        first.over_ideal_db,
    )
