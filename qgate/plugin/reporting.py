"""What the gates of a run found, collected across processes: records, updates, the summary."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from qgate.errors import QgateError
from qgate.plugin.gates import RECORDS
from qgate.plugin.options import models_of, update_choice
from qgate.plugin.sessions import sessions_of

OUT = "qgate-out"


def attach(item: pytest.Item, report: pytest.TestReport) -> None:
    """Put the records of a test on the report of its call, and a few numbers into JUnit."""
    if report.when != "call":
        return
    gates = item.stash.get(RECORDS, [])
    if not gates:
        return
    from qgate.results import binding, junit_properties

    rows = [
        {**row, "node": item.nodeid, "seconds": report.duration}
        for gate in gates
        for row in gate["rows"]
    ]
    if hasattr(report, "wasxfail"):
        rows = [{**row, "passed": True} for row in rows if row["checks"]]
    report.qgate = rows  # type: ignore[attr-defined]
    report.qgate_updated = sum(gate["updated"] for gate in gates)  # type: ignore[attr-defined]
    worst = min(rows, key=lambda row: (row["passed"], -_times(binding(row))), default=None)
    if worst is not None:
        # JUnit takes them from the report of the teardown, which is made from the item.
        item.user_properties += junit_properties(worst)


def _times(check: Any) -> float:
    return float((check or {}).get("times") or 0.0)


class Reports:
    """Listens to reports; the process that talks to the user writes and sums up."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.worker = hasattr(config, "workerinput")
        self.records: dict[str, list[dict[str, Any]]] = {}
        self.changes: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The last report of a test counts: reruns replace what was before."""
        if report.when == "call" and not self.worker and hasattr(report, "qgate"):
            self.records[report.nodeid] = report.qgate

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Any:
        if report.when == "call" and report.passed and getattr(report, "qgate_updated", None):
            return "updated", "U", ("UPDATED", {"yellow": True})
        return None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the baselines once all gates have spoken, then the records."""
        whole = int(exitstatus) in (0, 1)
        changes = self._commit() if whole and not session.shouldstop else []
        if self.worker:
            self.config.workeroutput["qgate_changes"] = changes  # type: ignore[attr-defined]
            return
        self.changes += changes
        if self.records:
            self._write()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.changes += (getattr(node, "workeroutput", None) or {}).get("qgate_changes", [])

    def _commit(self) -> list[str]:
        if update_choice(self.config) is None:
            return []
        dry = bool(self.config.getoption("qgate_update_dry_run"))
        told = []
        for held in sessions_of(self.config).values():
            try:
                told += [str(change) for change in held.commit(dry_run=dry)]
            except QgateError as error:
                raise pytest.UsageError(f"qgate: {error}") from None
        return told

    def _rows(self) -> list[dict[str, Any]]:
        return [row for rows in self.records.values() for row in rows]

    def _write(self) -> None:
        from qgate.results import Writer, github_annotation, markdown_summary, to_csv

        folder = self.config.rootpath / OUT
        folder.mkdir(exist_ok=True)
        rows = self._rows()
        writer = Writer(folder / "results.jsonl", self._header(rows))
        for row in rows:
            writer.append(row)
        to_csv(rows, folder / "results.csv")
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(markdown_summary(rows))
        if os.environ.get("GITHUB_ACTIONS"):
            for line in filter(None, (github_annotation(row) for row in rows)):
                sys.stdout.write(f"\n{line}\n")

    def _header(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        from qgate.results import new_header
        from qgate.stats.metrics import METRICS

        get = self.config.getoption
        metrics = [{"name": m.name, "direction": m.direction} for m in METRICS]
        models = {}
        plans: dict[str, dict[str, str]] = {}
        limits: list[dict[str, Any]] = []
        for held in sessions_of(self.config).values():
            origin = held.origin()
            models[origin.model] = {"weights": origin.weights, "inputs": origin.inputs}
            plans |= held.plans()
            limits = held.policy.to_dict()
        return new_header(
            torch=str(torch.__version__),
            device=get("qgate_device"),
            seed=0,
            commit=None,
            command=list(self.config.invocation_params.args),
            modes=list(dict.fromkeys(row["mode"] for row in rows)),
            plans=plans,
            metrics=metrics,
            limits=limits,
            models=models,
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        quiet = self.worker or getattr(self.config.option, "no_summary", False)
        if quiet or not (self.records or self.changes):
            return
        from qgate.results import summary_lines

        write = terminalreporter.write_line
        terminalreporter.section(f"qgate: {', '.join(models_of(self.config))}")
        for line in summary_lines(self._rows()):
            write(line)
        if update_choice(self.config) is not None:
            dry = self.config.getoption("qgate_update_dry_run")
            write(f"baselines: {len(self.changes)} entries {'would change' if dry else 'written'}")
            for change in self.changes[:20]:
                write(f"  {change}")
            if len(self.changes) > 20:
                write(f"  and {len(self.changes) - 20} more")
        write(f"records in {OUT}/results.jsonl and {OUT}/results.csv")
