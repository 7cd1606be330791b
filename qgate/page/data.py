"""A report as data: JSON after `qgate/results/report.schema.json`, and a table of a comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from qgate._version import __version__
from qgate.page.comparisons import EQUAL, Row, RunComparison
from qgate.page.history import Point
from qgate.page.runs import RecordedGate, Run
from qgate.results.schema import line
from qgate.results.summary import Finding, ModeSummary, Tally
from qgate.text import as_csv

SCHEMA = 1
KIND = "qgate report"
_HEADER = ("started", "commit", "device", "torch", "python", "qgate", "seed", "reference",
           "command", "models", "complete")  # fmt: skip
_ROW = ("group", "suite", "model", "mode", "layer", "site", "scope", "metric")


def report_json(
    runs: Sequence[tuple[Run, Tally]],
    comparison: RunComparison | None = None,
    history: Sequence[Point] = (),
) -> str:
    """Runs with all gates, their comparison without what is equal, and the history.

    A number that JSON does not have is null, and `reason` says which it was.
    """
    given = {
        "schema": SCHEMA,
        "kind": KIND,
        "qgate": __version__,
        "runs": [_run(run, tally) for run, tally in runs],
        "comparison": None if comparison is None else _comparison(comparison),
        "history": [_point(point) for point in history],
    }
    return json.dumps(json.loads(line(given)), indent=1, ensure_ascii=True) + "\n"


def _run(run: Run, tally: Tally) -> dict[str, Any]:
    counts = tally.counts
    return {
        "name": run.name,
        **{name: run.header.get(name) for name in _HEADER},
        "passed": run.passed,
        "finished": run.finished,
        "torn": run.torn,
        "counts": {
            "gates": tally.gates,
            "failed_gates": tally.failed_gates,
            "comparisons": counts.passed + counts.failed,
            "failed": counts.failed,
            "checks": counts.checks,
            "improved": counts.improved,
            "missing": counts.missing,
        },
        "broken": run.broken,
        "errors": run.errors,
        "other": dict(run.other),
        "modes": [_mode(mode) for mode in tally.modes],
        "gates": [_gate(gate) for gate in run.gates],
    }


def _mode(mode: ModeSummary) -> dict[str, Any]:
    return {
        "model": mode.model,
        "mode": mode.mode,
        "gates": mode.gates,
        "failed_gates": mode.failed,
        "comparisons": mode.comparisons,
        "failed": mode.failures,
        "worst": _finding(mode.worst) if mode.worst else None,
        "carried": [
            {"metric": each.metric, "value": each.value, "grade": each.grade}
            for each in mode.carried
        ],
        "errors": dict(mode.errors),
    }


def _finding(found: Finding) -> dict[str, Any]:
    names = ("node", "layer", "site", "scope", "passed", "accepted")
    return {**{name: getattr(found, name) for name in names}, **_check(found.check)}


def _check(check: Mapping[str, Any] | None) -> dict[str, Any]:
    names = ("metric", "kind", "value", "side", "bound", "times")
    return {name: check[name] if check else None for name in names}


def _gate(gate: RecordedGate) -> dict[str, Any]:
    names = ("suite", "model", "mode", "layer", "site", "scope")
    return {
        "node": gate.node,
        **{name: str(gate.record[name]) for name in names},
        "passed": gate.passed,
        "comparisons": gate.comparisons,
        "failed": gate.failures,
        "improved": gate.improved,
        **_check(gate.check),
        "accepted": gate.accepted,
        "change": gate.change,
    }


def _comparison(comparison: RunComparison) -> dict[str, Any]:
    return {
        "runs": list(comparison.names),
        "differences": [
            {"what": d.what, "about": d.about, "values": list(d.values), "warning": d.warning}
            for d in comparison.differences
        ],
        "equal_within": EQUAL,
        "counts": dict(comparison.counts),
        "still_failing": comparison.still_failing,
        "rows": [_row(row) for row in comparison.rows if row.group != "equal"],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        **{name: getattr(row, name) for name in _ROW},
        "runs": [cell._asdict() if cell else None for cell in row.cells],
        "ratios": list(row.ratios),
    }


def _point(point: Point) -> dict[str, Any]:
    modes = [dict(vars(mode)) for mode in point.modes]
    return {**vars(point), "command": list(point.command), "modes": modes}


def comparison_csv(comparison: RunComparison) -> str:
    """Every row, also the equal ones: for each run its value, how many times its limit that is,
    and whether it passed; the ratio to the first run for each later one."""
    names = _distinct(comparison.names)
    columns = [*_ROW]
    for name in names:
        columns += [f"{name} value", f"{name} times", f"{name} passed"]
    columns += [f"{name} ratio" for name in names[1:]]
    return as_csv(columns, (_flat(row, names) for row in comparison.rows))


def _distinct(names: Sequence[str]) -> list[str]:
    """Columns of their own, also where two runs have one name."""
    return [
        name if list(names).count(name) == 1 else f"{name} {place}"
        for place, name in enumerate(names, start=1)
    ]


def _flat(row: Row, names: Sequence[str]) -> dict[str, Any]:
    given: dict[str, Any] = {name: getattr(row, name) for name in _ROW}
    if not row.mode:
        given["mode"] = " / ".join(dict.fromkeys(cell.mode for cell in row.cells if cell))
    for name, cell in zip(names, row.cells, strict=True):
        if cell is not None:
            given |= {f"{name} value": cell.value, f"{name} times": cell.times}
            given[f"{name} passed"] = cell.passed
    given |= {f"{n} ratio": ratio for n, ratio in zip(names[1:], row.ratios, strict=True)}
    return given
