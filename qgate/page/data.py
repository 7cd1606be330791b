"""A report as data: JSON after `qgate/results/report.schema.json`, and a table of a comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from qgate._version import __version__
from qgate.page.comparisons import Row, RunComparison
from qgate.page.runs import RecordedGate, Run
from qgate.results.files import line
from qgate.results.movements import EQUAL
from qgate.results.summary import ComparisonSummary, ModeSummary, Tally
from qgate.text import as_csv

SCHEMA = 1
KIND = "qgate report"
_HEADER = ("started", "commit", "device", "torch", "python", "qgate", "seed", "reference",
           "command", "models", "complete", "extent")  # fmt: skip
_CHECK = ("metric", "kind", "value", "side", "bound", "times")
_ROW = ("group", "suite", "model", "mode", "layer", "site", "scope", "metric")


def report_json(
    runs: Sequence[tuple[Run, Tally]],
    comparison: RunComparison | None = None,
) -> str:
    """Write runs with all gates, and their comparison without equal rows, as JSON.

    A number that JSON does not have is null, and `reason` says which it was.
    """
    content = {
        "schema": SCHEMA,
        "kind": KIND,
        "qgate": __version__,
        "runs": [_run(run, tally) for run, tally in runs],
        "comparison": None if comparison is None else _comparison(comparison),
    }
    return json.dumps(json.loads(line(content)), indent=1, ensure_ascii=True) + "\n"


def _run(run: Run, tally: Tally) -> dict[str, object]:
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


def _mode(mode: ModeSummary) -> dict[str, object]:
    return {
        "model": mode.model,
        "mode": mode.mode,
        "gates": mode.gates,
        "failed_gates": mode.failed,
        "comparisons": mode.comparisons,
        "failed": mode.failures,
        "worst": _worst(mode.worst) if mode.worst else None,
        "carried": [error._asdict() for error in mode.carried],
        "errors": dict(mode.errors),
    }


def _worst(finding: ComparisonSummary) -> dict[str, object]:
    names = ("node", "layer", "site", "scope", "passed", "accepted")
    return {**{name: getattr(finding, name) for name in names}, **_check(finding.check)}


def _check(check: Mapping[str, object] | None) -> dict[str, object]:
    return {name: check[name] if check else None for name in _CHECK}


def _gate(gate: RecordedGate) -> dict[str, object]:
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


def _comparison(comparison: RunComparison) -> dict[str, object]:
    return {
        "runs": list(comparison.names),
        "differences": [difference._asdict() for difference in comparison.differences],
        "equal_within": EQUAL,
        "counts": dict(comparison.counts),
        "still_failing": comparison.still_failing,
        "rows": [
            {
                **{name: getattr(row, name) for name in _ROW},
                "runs": [cell._asdict() if cell else None for cell in row.cells],
                "ratios": [row.ratio],
            }
            for row in comparison.rows
            if row.group != "equal"
        ],
    }


def comparison_csv(comparison: RunComparison) -> str:
    """Write every row of a comparison, equal ones included.

    Each run has a value, how many times its limit that is, and its verdict; the second has its
    ratio to the first.
    """
    # Two runs may have one name.
    names = [
        name if comparison.names.count(name) == 1 else f"{name} {number}"
        for number, name in enumerate(comparison.names, start=1)
    ]
    measured = [f"{name} {figure}" for name in names for figure in ("value", "times", "passed")]
    columns = [*_ROW, *measured, f"{names[1]} ratio"]
    return as_csv(columns, (_flat(row, names) for row in comparison.rows))


def _flat(row: Row, names: Sequence[str]) -> dict[str, object]:
    cells: dict[str, object] = {name: getattr(row, name) for name in _ROW}
    if not row.mode:
        cells["mode"] = " / ".join(dict.fromkeys(cell.mode for cell in row.cells if cell))
    for name, cell in zip(names, row.cells, strict=True):
        if cell is not None:
            cells |= {f"{name} value": cell.value, f"{name} times": cell.times}
            cells[f"{name} passed"] = cell.passed
    return cells | {f"{names[1]} ratio": row.ratio}
