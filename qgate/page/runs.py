"""The records of a run, gathered to its gates: one per test, with what bound it.

A results file is read once, record by record; of a gate stay the comparison nearest to its limit
and the worst failures, so that memory depends on the number of gates and not on that of sites.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qgate.results import binding, read
from qgate.results.others import is_finished, others_of
from qgate.results.ranking import severity
from qgate.results.reading import told_of
from qgate.results.schema import Record

Check = Mapping[str, Any]
# Failed comparisons kept of one gate, worst first; the rest is counted and stands in results.csv.
MOST_FAILED = 40
# Where a test is that holds several layers at once, such as that of the reference.
EVERYWHERE = "all layers"
# What stands for a cell of the heat map, the most telling scope first.
_SCOPES = ("carried", "local", "sweep", "forward", "backward", "task")


@dataclass(frozen=True)
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
        """Whether nothing is wrong with it but that no errors were accepted yet."""
        checks = [check for record in self.failed for check in record["checks"]]
        return not self.passed and all(c["passed"] or c["kind"] == "missing" for c in checks)

    @property
    def value(self) -> float | None:
        return self.check["value"] if self.check else None

    @property
    def accepted(self) -> float | None:
        """What was accepted for the metric that bound it."""
        known: Mapping[str, float | None] = self.record["accepted"] or {}
        return known.get(str(self.check["metric"])) if self.check else None

    @property
    def change(self) -> float | None:
        """The value over the accepted one; None where one of them is missing or zero."""
        if self.value is None or not self.accepted:
            return None
        return self.value / self.accepted

    @property
    def margin(self) -> float:
        """How many times its limit the worst comparison is; infinite where no number says it."""
        if self.check is None or (not self.check["passed"] and self.check["times"] is None):
            return math.inf
        return float(self.check["times"] or 0.0)


@dataclass(frozen=True)
class LayerError:
    """The error of one layer in one mode, in the scope that tells most, and its worst gate."""

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
    """The relative MSE at the outputs of blocks, in the order of execution."""

    model: str
    mode: str
    layers: tuple[str, ...]
    carried: tuple[float | None, ...]
    local: tuple[float | None, ...]


@dataclass(frozen=True)
class Run:
    """A results file as it is shown; gates are worst first."""

    name: str
    header: Record
    gates: tuple[RecordedGate, ...]
    spots: tuple[LayerError, ...]
    growth: tuple[Growth, ...]
    comparisons: int
    checks: int
    torn: str = ""

    @property
    def broken(self) -> dict[str, str]:
        """Tests whose set-up failed, so that there is no verdict: node → first line."""
        return dict(self.header.get("broken") or {})

    @property
    def failed(self) -> list[RecordedGate]:
        return [gate for gate in self.gates if not gate.passed]

    @property
    def passed(self) -> bool:
        """A run that compared nothing did not pass, nor did one that was broken off, or in which
        other tests failed: pytest was red then."""
        wrong = self.failed or self.broken or self.errors or self.other["failed"]
        return bool(self.gates) and not wrong and self.header.get("exit", 0) == 0

    @property
    def finished(self) -> bool:
        """Whether it came to its end; a file of an earlier version does not say, and counts."""
        return is_finished(self.header)

    @property
    def other(self) -> Mapping[str, Any]:
        """Tests that are no gates: how many passed, failed and skipped, and first lines."""
        return others_of(self.header)

    @property
    def errors(self) -> list[str]:
        """What could not be written, and the like."""
        return list(self.header.get("errors") or [])


@dataclass
class _Gathered:
    """One test while its records come in."""

    attempt: int
    worst: Record
    failed: list[Record] = field(default_factory=list)
    failures: int = 0
    comparisons: int = 0
    checks: int = 0
    improved: bool = False
    # By scope: the largest relative MSE, and those at block outputs by site.
    errors: dict[str, float] = field(default_factory=dict)
    blocks: dict[tuple[str, str], tuple[int, float | None]] = field(default_factory=dict)
    order: int = 0
    layers: set[str] = field(default_factory=set)


def read_run(path: Path | str, name: str = "") -> Run:
    """A results file, gathered; `name` is what it is called beside others."""
    header, records = read(path)
    gathered = _gather(records)
    return run_of(told_of(header, records), gathered, name or Path(path).stem, records.torn)


def run_of_records(header: Record, records: Iterable[Record], name: str = "") -> Run:
    """The same of records in memory."""
    return run_of(header, _gather(records), name, "")


def _gather(records: Iterable[Record]) -> dict[str, _Gathered]:
    """By test; what an earlier attempt of a test left is dropped when a later one comes."""
    found: dict[str, _Gathered] = {}
    for record in records:
        node, attempt = record["node"], record.get("attempt", 0)
        known = found.get(node)
        if known is None or attempt > known.attempt:
            known = found[node] = _Gathered(attempt, record, order=record.get("order", 0))
        elif attempt < known.attempt:
            continue
        _add(known, record)
    return found


def _add(known: _Gathered, record: Record) -> None:
    known.comparisons += 1
    known.checks += len(record["checks"])
    known.layers.add(str(record["layer"]))
    known.improved |= any(check["improved"] for check in record["checks"])
    known.order = min(known.order, record.get("order", 0))
    if _rank(record) > _rank(known.worst):
        known.worst = record
    if not record["passed"]:
        known.failures += 1
        # Only the worst record of a gate is drawn; pictures of forty others would fill the memory.
        known.failed.append({key: each for key, each in record.items() if key != "pictures"})
        if len(known.failed) > 2 * MOST_FAILED:
            known.failed = sorted(known.failed, key=_rank, reverse=True)[:MOST_FAILED]
    error, scope = record["values"].get("relative_mse"), record["scope"]
    if error is not None:
        known.errors[scope] = max(known.errors.get(scope, 0.0), error)
    if scope in ("carried", "local"):
        known.blocks[scope, record["site"]] = (record.get("order", 0), error)


def _rank(record: Record) -> tuple[Any, ...]:
    check = binding(record)
    return (not record["passed"], *(severity(check) if check else (0, 0, 0.0)))


def run_of(header: Record, found: Mapping[str, _Gathered], name: str, torn: str) -> Run:
    """Gates, worst first, and what is shown of all of them together."""
    in_order = sorted(found.items(), key=lambda each: (each[1].order, each[0]))
    ranked = sorted(in_order, key=lambda each: _rank(each[1].worst), reverse=True)
    gates = {
        node: RecordedGate(
            number=number,
            node=node,
            record=known.worst,
            check=binding(known.worst),
            failed=tuple(sorted(known.failed, key=_rank, reverse=True)[:MOST_FAILED]),
            failures=known.failures,
            comparisons=known.comparisons,
            improved=known.improved,
        )
        for number, (node, known) in enumerate(ranked, start=1)
    }
    return Run(
        name,
        header,
        tuple(gates.values()),
        tuple(_spots(gates, found)),
        tuple(_growth(found)),
        sum(known.comparisons for known in found.values()),
        sum(known.checks for known in found.values()),
        torn,
    )


def _spots(gates: Mapping[str, RecordedGate], found: Mapping[str, _Gathered]) -> list[LayerError]:
    places: dict[tuple[str, str, str], list[str]] = {}
    for node in gates:
        record = found[node].worst
        layer = EVERYWHERE if len(found[node].layers) > 1 else str(record["layer"])
        key = (str(record["model"]), str(record["mode"]), layer)
        places.setdefault(key, []).append(node)
    spots = []
    for (model, mode, layer), nodes in places.items():
        # Gates are worst first, so the first node is the worst of its place.
        errors: dict[str, float] = {}
        for node in nodes:
            for scope, error in found[node].errors.items():
                errors[scope] = max(errors.get(scope, 0.0), error)
        scope = next((s for s in _SCOPES if s in errors), "")
        spots.append(
            LayerError(
                model,
                mode,
                layer,
                min(found[node].order for node in nodes),
                scope,
                errors.get(scope),
                gates[nodes[0]],
                len(nodes),
                sum(not gates[node].passed for node in nodes),
            )
        )
    return sorted(spots, key=lambda spot: (spot.model, spot.mode, spot.order, spot.layer))


def _growth(found: Mapping[str, _Gathered]) -> list[Growth]:
    """Block outputs are the sites that have a carried error."""
    by_mode: dict[tuple[str, str], dict[str, tuple[int, str, float | None, float | None]]] = {}
    for known in found.values():
        record = known.worst
        carried = {site: at for (scope, site), at in known.blocks.items() if scope == "carried"}
        for site, (order, error) in carried.items():
            local = known.blocks.get(("local", site), (0, None))[1]
            sites = by_mode.setdefault((str(record["model"]), str(record["mode"])), {})
            sites[site] = (order, str(record["layer"]), error, local)
    lines = []
    for (model, mode), sites in sorted(by_mode.items()):
        rows = sorted(sites.values(), key=lambda row: row[:2])
        layers, carry, local_errors = (tuple(row[i] for row in rows) for i in (1, 2, 3))
        lines.append(Growth(model, mode, layers, carry, local_errors))  # type: ignore[arg-type]
    return lines
