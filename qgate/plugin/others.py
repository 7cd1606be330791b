"""Tests that are no gates, as the records of a run tell of them: pytest is red for any that fails.

A test with a gate is one of them where it failed by something else: an assertion of its own, a
strict xfail that passed.
"""

from __future__ import annotations

from typing import Any

import pytest


class Others:
    """Listens to reports. Of a test that is run again the last time counts."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.lines: dict[str, str] = {}

    def hear(self, report: pytest.TestReport) -> None:
        node = report.nodeid
        is_gate = hasattr(report, "qgate_gate")
        if report.when == "setup":
            self.outcomes.pop(node, None)
            self.lines.pop(node, None)
        if is_gate and (not report.failed or _is_told(report)):
            return
        if report.failed:
            self.outcomes[node] = "failed"
            self.lines.setdefault(node, first_line(report))
        elif report.when == "call" or report.skipped:
            # A part of a test says nothing of the whole.
            self.outcomes.setdefault(node, "skipped" if report.skipped else "passed")

    def hear_collecting(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
            self.lines.setdefault(report.nodeid, first_line(report))

    def told(self) -> dict[str, Any]:
        from qgate.results.others import told_others

        return told_others(self.outcomes, self.lines)

    @property
    def failed(self) -> bool:
        return "failed" in self.outcomes.values()


def _is_told(report: pytest.TestReport) -> bool:
    """Whether a gate that failed stands among the records, or among those without a verdict."""
    if report.when != "call" or hasattr(report, "qgate_error"):
        return True
    return any(not row["passed"] for row in getattr(report, "qgate", ()))


def first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """What a failure says first; also of one without a crash, such as a fixture that is not
    there."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if message := getattr(crash, "message", ""):
        return str(message)
    lines = str(report.longrepr).splitlines()
    found = [line[1:].strip() for line in lines if line.startswith("E ")]
    return next(iter([*found, *lines]), "")
