"""Gates of a run, gathered from its records: one per test, with its binding comparison.

A results file is read once, record by record; of a gate stay the comparison nearest to its limit
and the worst failures, so that memory depends on the number of gates and not on that of sites.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from qgate.charts.overviews import Overview, Overviewed
from qgate.results import binding, read
from qgate.results.checks import badness, is_counted
from qgate.results.failure_causes import FailureCause
from qgate.results.files import effective_header
from qgate.results.kinds import SCOPES, limit_kind_of, scope_of
from qgate.results.run_facts import is_finished, other_tests_of
from qgate.results.schema import Record
from qgate.results.summary import Tally
from qgate.text import counted

Check = Mapping[str, Any]
# Failed comparisons kept of one gate, worst first; the rest is counted and stands in results.csv.
MOST_FAILED = 40
# Gates whose pictures are kept, worst first: no page has room for the plots of more.
MOST_DRAWN = 2000
# At most ten, which fit in a small dictionary.
_PASSED_FIELDS = ("suite", "model", "mode", "layer", "site", "scope", "seconds", "accepted",
                  "checks", "passed")  # fmt: skip
# Where a test is that holds several layers at once, such as that of the reference.
EVERYWHERE = "all layers"


@dataclass(frozen=True, slots=True)
class RecordedGate:
    """One test: its verdict, and the comparison that decided it or came nearest to its limit."""

    number: int
    node: str
    record: Record
    check: Check | None
    failed: tuple[Record, ...]
    failures: int
    comparisons: int
    improved: bool

    @property
    def anchor(self) -> str:
        return f"gate-{self.number}"

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def is_new(self) -> bool:
        """Tell if the gate fails only because no errors are accepted yet."""
        checks = [check for record in self.failed for check in record["checks"]]
        return not self.passed and all(
            c["passed"] or limit_kind_of(c["kind"]).is_new for c in checks
        )

    @property
    def value(self) -> float | None:
        return self.check["value"] if self.check else None

    @property
    def accepted(self) -> float | None:
        """Return the accepted value of the binding metric."""
        accepted: Mapping[str, float | None] = self.record["accepted"] or {}
        return accepted.get(str(self.check["metric"])) if self.check else None

    @property
    def change(self) -> float | None:
        """Return the value over the accepted one; None where one of them is missing or zero."""
        if self.value is None or not self.accepted:
            return None
        return self.value / self.accepted

    @property
    def margin(self) -> float:
        """Return how many times its limit the worst comparison is; infinite without a number."""
        if self.check is None or (not self.check["passed"] and self.check["times"] is None):
            return math.inf
        return float(self.check["times"] or 0.0)


@dataclass(frozen=True, slots=True)
class LayerError:
    """The error of one layer in one mode, in its most telling scope, and its worst gate."""

    model: str
    mode: str
    layer: str
    order: int
    scope: str
    error: float | None
    gate: RecordedGate
    gates: int
    failed: int


@dataclass(frozen=True)
class Growth:
    """Relative MSE at the outputs of blocks, in the order of execution."""

    model: str
    mode: str
    layers: tuple[str, ...]
    carried: tuple[float | None, ...]
    local: tuple[float | None, ...]


@dataclass(frozen=True, repr=False)
class Run(Overviewed):
    """A results file as shown, gates worst first."""

    name: str
    header: Record
    gates: tuple[RecordedGate, ...]
    layer_errors: tuple[LayerError, ...]
    growth: tuple[Growth, ...]
    comparisons: int
    checks: int
    tally: Tally
    torn: str = ""

    def overview(self) -> Overview:
        """Describe the run: what failed and why, and its gates, worst first."""
        failed = len(self.failed)
        title = f"Run {self.name}: {counted(len(self.gates), 'gate')}, {failed:,} failed"
        lines = [*(cause.title() for cause in self.causes[:3]), *self.errors[:2]]
        return Overview(title, self.gates, _gate_row, "gate", lines, "times the limit")

    @cached_property
    def causes(self) -> list[FailureCause]:
        """Return the causes of what failed, the likeliest first."""
        return self.tally.causes

    @property
    def broken(self) -> dict[str, str]:
        """Return the tests whose set-up failed, and which have no verdict: node → first line."""
        return dict(self.header.get("broken") or {})

    @property
    def failed(self) -> list[RecordedGate]:
        return [gate for gate in self.gates if not gate.passed]

    @property
    def passed(self) -> bool:
        """Tell if pytest was green and something was compared."""
        wrong = self.failed or self.broken or self.errors or self.other["failed"]
        return bool(self.gates) and not wrong and self.header.get("exit", 0) == 0

    @property
    def finished(self) -> bool:
        """Tell if the run came to its end; files of earlier versions count as finished."""
        return is_finished(self.header)

    @property
    def other(self) -> Mapping[str, Any]:
        """Return tests that are no gates: how many passed, failed and skipped, and first lines."""
        return other_tests_of(self.header)

    @property
    def errors(self) -> list[str]:
        """Return errors such as files that could not be written."""
        return list(self.header.get("errors") or [])


@dataclass(slots=True)
class _GateRecords:
    """The records of one test while they come in."""

    attempt: int
    worst: Record
    badness: tuple[Any, ...]
    failed: list[Record] = field(default_factory=list)
    failures: int = 0
    comparisons: int = 0
    checks: int = 0
    improved: bool = False
    # By scope: the largest relative MSE, and those at block outputs by site.
    errors: dict[str, float] = field(default_factory=dict)
    blocks: dict[tuple[str, str], tuple[int, float | None]] = field(default_factory=dict)
    order: int = 0
    layer: str = ""
    """Its layer, or EVERYWHERE."""


def read_run(
    path: Path | str, *, each: Callable[[Record], object] | None = None, trusted: bool = False
) -> Run:
    """Read a results file; the run has its name. `each` gets every record as it is read."""
    header, records = read(path, trusted=trusted)
    seen = records if each is None else _shown(records, each)
    run = run_of_records(header, seen, Path(path).stem)
    return replace(run, header=effective_header(header, records), torn=records.torn)


def _shown(records: Iterable[Record], each: Callable[[Record], object]) -> Iterator[Record]:
    for record in records:
        each(record)
        yield record


def run_of_records(
    header: Record, records: Iterable[Record], name: str = "", *, brief: bool = False
) -> Run:
    """Gather records to gates, worst first, and to the errors of layers.

    brief   only what failed, and what came nearest to its limit; `tally` counts all
    """
    tally = Tally()
    counted_records = tally.pass_through(records)
    gathered = _gather(_telling(counted_records) if brief else counted_records)
    if brief:
        tally.keep_sums()
    in_order = sorted(gathered.items(), key=lambda entry: (entry[1].order, entry[0]))
    ranked = sorted(in_order, key=lambda entry: entry[1].badness)
    gates = {
        node: RecordedGate(
            number=number,
            node=node,
            record=gate.worst,
            check=binding(gate.worst),
            failed=tuple(sorted(gate.failed, key=badness)[:MOST_FAILED]),
            failures=gate.failures,
            comparisons=gate.comparisons,
            improved=gate.improved,
        )
        for number, (node, gate) in enumerate(ranked, start=1)
    }
    return Run(
        name,
        header,
        tuple(gates.values()),
        tuple(_layer_errors(gates, gathered)),
        tuple(_growth(gathered)),
        sum(gate.comparisons for gate in gathered.values()),
        sum(gate.checks for gate in gathered.values()),
        tally,
    )


def _telling(records: Iterable[Record]) -> Iterator[Record]:
    """Leave out records that passed, but for the nearest to its limit and those of reruns."""
    nearest: tuple[Any, ...] | None = None
    for record in filter(is_counted, records):
        bad = badness(record)
        if nearest is None or bad < nearest or not record["passed"] or record.get("attempt"):
            nearest = bad if record["passed"] else nearest
            yield record


def _gather(records: Iterable[Record]) -> dict[str, _GateRecords]:
    """Gather records by test; a later attempt of a test replaces an earlier one."""
    gathered: dict[str, _GateRecords] = {}
    pictured: dict[str, _GateRecords] = {}
    least_bad: tuple[Any, ...] | None = None
    for record in filter(is_counted, records):
        bad = badness(record)
        node, attempt = record["node"], record.get("attempt", 0)
        gate = gathered.get(node)
        if gate is None or attempt > gate.attempt:
            order = record.get("order", 0)
            gate = gathered[node] = _GateRecords(attempt, record, bad, order=order)
        elif attempt < gate.attempt:
            continue
        elif bad < gate.badness:
            gate.worst, gate.badness = record, bad
        _add(gate, record)
        if gate.worst is not record:
            continue
        is_drawn = bool(record.get("pictures")) and (least_bad is None or bad < least_bad)
        gate.worst = _kept(record, is_drawn=is_drawn)
        pictured.pop(node, None)
        if is_drawn:
            pictured[node] = gate
        if len(pictured) > 2 * MOST_DRAWN:
            least_bad = _drop_pictures(pictured)
    _drop_pictures(pictured)
    return gathered


def _kept(record: Record, *, is_drawn: bool) -> Record:
    """Return what a page shows of a record; one that passed without odd numbers has few fields."""
    if record["passed"] and not record.get("reason"):
        kept: Record = {name: record[name] for name in _PASSED_FIELDS}
        kept["checks"] = [binding(record)]
    else:
        kept = _without_pictures(record)
    if is_drawn:
        kept["pictures"] = msgspec.json.encode(record["pictures"])  # a sixth of the memory
    return kept


def _drop_pictures(pictured: dict[str, _GateRecords]) -> tuple[Any, ...] | None:
    """Keep the pictures of the worst gates only, and return how bad the last one of these is."""
    ranked = sorted(pictured.items(), key=lambda entry: entry[1].badness)
    for node, gate in ranked[MOST_DRAWN:]:
        gate.worst = _without_pictures(gate.worst)
        del pictured[node]
    return ranked[:MOST_DRAWN][-1][1].badness if ranked else None


def _without_pictures(record: Record) -> Record:
    return {key: value for key, value in record.items() if key != "pictures"}


def _add(gate: _GateRecords, record: Record) -> None:
    gate.comparisons += 1
    gate.checks += len(record["checks"])
    layer = str(record["layer"])
    gate.layer = layer if gate.layer in ("", layer) else EVERYWHERE
    gate.improved |= any(check["improved"] for check in record["checks"])
    gate.order = min(gate.order, record.get("order", 0))
    if not record["passed"]:
        gate.failures += 1
        # Only the worst record of a gate is drawn; pictures of forty others would fill the memory.
        gate.failed.append(_without_pictures(record))
        if len(gate.failed) > 2 * MOST_FAILED:
            gate.failed = sorted(gate.failed, key=badness)[:MOST_FAILED]
    error, scope = record["values"].get("relative_mse"), record["scope"]
    if error is not None:
        gate.errors[scope] = max(gate.errors.get(scope, 0.0), error)
    if scope_of(scope).has_grades:
        gate.blocks[scope, record["site"]] = (record.get("order", 0), error)


def _layer_errors(
    gates: Mapping[str, RecordedGate], gathered: Mapping[str, _GateRecords]
) -> list[LayerError]:
    nodes_by_place: dict[tuple[str, str, str], list[str]] = {}
    for node in gates:
        record = gathered[node].worst
        key = (str(record["model"]), str(record["mode"]), gathered[node].layer)
        nodes_by_place.setdefault(key, []).append(node)
    cells = []
    for (model, mode, layer), nodes in nodes_by_place.items():
        # Gates are worst first, so the first node is the worst of its place.
        errors: dict[str, float] = {}
        for node in nodes:
            for scope, error in gathered[node].errors.items():
                errors[scope] = max(errors.get(scope, 0.0), error)
        scope, worst = representative_error(errors)
        order = min(gathered[node].order for node in nodes)
        failed = sum(not gates[node].passed for node in nodes)
        cell = (model, mode, layer, order, scope, worst)
        cells.append(LayerError(*cell, gates[nodes[0]], len(nodes), failed))
    return sorted(cells, key=lambda cell: (cell.model, cell.mode, cell.order, cell.layer))


def representative_error(errors: Mapping[str, float]) -> tuple[str, float | None]:
    """Return the most telling scope that has an error, and the error."""
    scope = next((s.name for s in SCOPES if s.name in errors and not s.against_noise), "")
    return scope, errors.get(scope)


def _growth(gathered: Mapping[str, _GateRecords]) -> list[Growth]:
    """Return the errors at block outputs, the sites with a carried error."""
    by_mode: dict[tuple[str, str], dict[str, tuple[int, str, float | None, float | None]]] = {}
    for gate in gathered.values():
        record = gate.worst
        blocks = [(scope_of(scope), site, *at) for (scope, site), at in gate.blocks.items()]
        local_of = {site: error for scope, site, _, error in blocks if scope.has_budget}
        for scope, site, order, error in blocks:
            if not scope.over_tokens:
                continue
            sites = by_mode.setdefault((str(record["model"]), str(record["mode"])), {})
            sites[site] = (order, str(record["layer"]), error, local_of.get(site))
    lines = []
    for (model, mode), sites in sorted(by_mode.items()):
        rows = sorted(sites.values(), key=lambda row: row[:2])
        layers, carry, local_errors = (tuple(row[i] for row in rows) for i in (1, 2, 3))
        lines.append(Growth(model, mode, layers, carry, local_errors))  # type: ignore[arg-type]
    return lines


def _gate_row(gate: RecordedGate) -> dict[str, object]:
    check: Check = gate.check or {}
    return {
        "site": gate.record["site"],
        "mode": gate.record["mode"],
        "verdict": "passed" if gate.passed else "failed",
        "metric": check.get("metric"),
        "value": check.get("value"),
        "times the limit": check.get("times"),
    }
