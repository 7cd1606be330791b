"""Gates of what must be the same twice: a model in a mode, compared with itself.

They need no baseline and accept nothing: limits are float noise, or the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qgate.errors import QgateError
from qgate.gate.measured import Conformance, Measured
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_subject import ModelSubject
from qgate.gate.measuring.site_rows import ModelSites
from qgate.gate.modules.relations import METRIC
from qgate.gate.policy import Policy
from qgate.gate.sessions import GateSession, Outcome, gate
from qgate.modes import Mode
from qgate.relations.compute import ModelRelations
from qgate.relations.decoding import check_all, check_briefly
from qgate.relations.noise import FloatNoise
from qgate.relations.record import RELATIONS, RelationReport
from qgate.relations.restarts import Rebuilding
from qgate.text import one_line

TITLE = "relations"
"""Name under which nothing is ever accepted."""


class RelationGates(GateSession):
    """Gates of one model's relations; with `bitwise` noise is no excuse.

    Unless it `is_deep`, a few ways are compared: along a long text, and a row beside others.
    """

    accepts = False

    def __init__(
        self,
        bench: Bench,
        baselines: Path,
        policy: Policy,
        *,
        bitwise: bool = False,
        is_deep: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(ModelSubject(bench), baselines, policy, **options)
        self.bench, self.bitwise, self.is_deep = bench, bitwise, is_deep
        self._noise: dict[tuple[str, str | None], FloatNoise] = {}

    def mode_named(self, name: str) -> Mode:
        return self.bench.mode(name)

    @gate
    def mode(self, suite: str, mode: Mode) -> Outcome:
        """Judge whether a mode gives the same however its tokens are computed."""
        report = self._report(mode)
        notes = {f"relation {name}": reason for name, reason in report.left_out.items()}
        rows = relation_rows(report, self.bench)
        return self.judge(suite, mode, rows, "relations", notes, title=TITLE)

    def _report(self, mode: Mode) -> RelationReport:
        bench = self.bench
        quantized = bench.quantized(mode)
        bench.progress(f"relations of {bench.model.name} in mode {mode.name}")
        base = bench.model.in_basis(quantized.model.basis)
        calibration = bench.calibration if mode.calibrated else None
        rebuilding = Rebuilding(bench.setup.load, mode, calibration, torch.get_num_threads())
        relations = ModelRelations(quantized, base, bitwise=self.bitwise, rebuilding=rebuilding)
        relations.excuses_reference = True
        key = (base.basis, mode.dtype)
        if key in self._noise:
            relations.noise = self._noise[key]
        if self.is_deep:
            report = check_all(relations, bench.long_text, frozenset(RELATIONS))
        else:
            report = self._brief_report(relations)
        self._noise[key] = relations.noise
        return report

    def _brief_report(self, relations: ModelRelations) -> RelationReport:
        """Compare the ways that every run does; what cannot be asked there is left out."""
        try:
            return check_briefly(relations, self.bench.long_text)
        except QgateError as error:
            relations.report.left_out["all"] = one_line(error)
            return relations.report


def relation_rows(report: RelationReport, bench: Bench) -> list[Measured]:
    """Return one row per site, with the first relation that does not hold there."""
    ways = sum(report.agreed.values())
    wrong: dict[str, list[Conformance]] = {}
    for relation in report.broken:
        first = report.first_of(relation)
        about = f"breaks {relation!r}: {first.words}"
        wrong.setdefault(first.site, []).append(
            Conformance(METRIC, first.compared, first.wrong, about)
        )
    rows, places = [], ModelSites({}, bench.layer_of)
    for order, (site, values) in enumerate(report.sites.items()):
        listed = wrong.get(site, [])
        about = f"the same in {ways} ways to compute it"
        figure = Conformance(METRIC, values, 0, about)
        if listed:
            more = [c.about.partition(":")[0].removeprefix("breaks ") for c in listed[1:]]
            about = "; also ".join([listed[0].about, *more])
            figure = Conformance(METRIC, listed[0].values, listed[0].differing, about)
        rows.append(places.row(site, "local", order, conformance=(figure,)))
    if not rows:
        why = "; ".join(report.left_out.values())
        figure = Conformance(METRIC, 1, 0, f"left out: {why}")
        output = next(reversed(bench.model.sites())).name
        rows.append(places.row(output, "local", 0, conformance=(figure,)))
    return rows
