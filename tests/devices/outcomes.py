"""A pytest plugin that writes the outcome of each test into the journal of a part, as it ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.devices.journal import Journal
from tests.devices.lanes import die_with_parent
from tests.devices.record import Row

JOURNAL = "QGATE_DEVICES_JOURNAL"


class Outcomes:
    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = round(report.duration, 3)
        if report.failed:
            text = _first_line(report)
            if report.when != "call":
                text = f"{report.when}: {text}"
            self.journal.add_row(Row(report.nodeid, "wrong", text, seconds))
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self.journal.add_row(Row(report.nodeid, "noted", reason or "expected to fail", seconds))
        elif report.when == "call":
            self.journal.add_row(Row(report.nodeid, "right", "", seconds))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.journal.add_row(Row(report.nodeid or "collection", "wrong", _first_line(report)))


def _first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def pytest_configure(config: pytest.Config) -> None:
    die_with_parent()
    if not hasattr(config, "workerinput"):  # pytest-xdist sends what its workers report
        config.pluginmanager.register(Outcomes(Journal(Path(os.environ[JOURNAL]))))
