"""What the gates of a run found, collected across processes: records, updates, the summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qgate.errors import QgateError
from qgate.plugin.gates import RECORDS
from qgate.plugin.options import update_choice
from qgate.plugin.sessions import sessions_of


def attach(item: pytest.Item, report: pytest.TestReport) -> None:
    """Put the records of a test on the report of its call."""
    if report.when == "call":
        report.qgate = item.stash.get(RECORDS, [])  # type: ignore[attr-defined]


class Reports:
    """Listens to reports; the process that talks to the user writes and sums up."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.worker = hasattr(config, "workerinput")
        self.records: list[dict[str, Any]] = []
        self.changes: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and not self.worker:
            self.records += getattr(report, "qgate", [])

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Any:
        found = getattr(report, "qgate", [])
        if report.when == "call" and report.passed and any(r["updated"] for r in found):
            return "updated", "U", ("UPDATED", {"yellow": True})
        return None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the baselines once all gates have spoken, then the records."""
        changes = [] if session.shouldfail or session.shouldstop else self._commit()
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

    def _write(self) -> None:
        folder = self.config.rootpath / "qgate-out"
        folder.mkdir(exist_ok=True)
        lines = [json.dumps(_plain(record), allow_nan=False) for record in self.records]
        (folder / "results.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.worker or not (self.records or self.changes) or self.config.option.no_summary:
            return
        write = terminalreporter.write_line
        terminalreporter.section("qgate")
        failed = sum(not record["passed"] for record in self.records)
        improved = sum(len(record["improved"]) for record in self.records)
        write(
            f"{len(self.records)} gates: {len(self.records) - failed} passed, {failed} failed"
            + (f"; improved: {improved} (bank it with --update-baselines)" if improved else "")
        )
        for line in _worst(self.records):
            write(line)
        if update_choice(self.config) is not None:
            dry = self.config.getoption("qgate_update_dry_run")
            write(f"baselines: {len(self.changes)} entries {'would change' if dry else 'written'}")
            for change in self.changes[:20]:
                write(f"  {change}")
            if len(self.changes) > 20:
                write(f"  and {len(self.changes) - 20} more")
        write(f"records in {Path('qgate-out') / 'results.jsonl'}")


def _worst(records: list[dict[str, Any]]) -> list[str]:
    """Per model and mode the worst carried relative MSE and, of tasks, the loss."""
    told: dict[str, list[str]] = {}
    for record in records:
        here = told.setdefault(f"{record['model']} {record['mode']}", [])
        for each in record["measured"]:
            if each["scope"] == "carried":
                here.append(f"{each['values']['relative_mse']:.3e}")
    rows = {name: max(values, key=float) for name, values in told.items() if values}
    ordered = sorted(rows.items(), key=lambda row: -float(row[1]))
    return [f"  {name:28} worst carried relative_mse {value}" for name, value in ordered]


def _plain(value: Any) -> Any:
    """NaN and infinities as null, which JSON has."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
