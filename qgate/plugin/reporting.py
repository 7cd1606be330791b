"""What the gates of a run found, as pytest reports it: outcomes, records, exit status."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qgate.errors import QgateError
from qgate.plugin.gates import COMPUTING, OUT, OUTCOMES
from qgate.plugin.options import command_of, home_of, shown_baselines, update_choice, value
from qgate.plugin.others import Others, first_line
from qgate.plugin.parts import (
    Part,
    conflicts_of,
    is_update,
    joined_facts,
    joined_selection,
    part_of,
    write_updates,
)
from qgate.plugin.sharding import shard_of
from qgate.plugin.telling import Told, is_complete, tell, unused_lines
from qgate.plugin.watching import underflow_lines

if TYPE_CHECKING:
    from qgate.page.runs import Run

_KEY = "qgate"
_PASSED: pytest.StashKey[bool] = pytest.StashKey()
# Changes of an update that the header of the records lists; the rest it counts.
_CHANGES = 200
_UNUSED = "the gate of this test was never asked: nothing was compared"


def attach(item: pytest.Item, report: pytest.TestReport) -> None:
    """Put the records of a test on the report of its call, and a few numbers into JUnit.

    What was raised while a gate computed makes the test an error. The first line is all that the
    short summary and JUnit show, and needs no name of an exception.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    if item.get_closest_marker("qgate") is None:
        return
    # Not by keywords: those of a report have the names of modules and folders among them.
    report.qgate_gate = True  # type: ignore[attr-defined]
    if crash is not None:
        crash.message = crash.message.removeprefix("Failed: ").partition("\n")[0]
    outcomes = item.stash.get(OUTCOMES, None)
    if report.when == "setup" or outcomes is None:
        return
    if report.when == "teardown":
        _keep(item, report)
        return
    _tell_kept(item, report)
    if report.failed and item.stash.get(COMPUTING, False):
        report.qgate_error = True  # type: ignore[attr-defined]
    if not outcomes:
        if report.passed and not hasattr(report, "wasxfail"):
            report.outcome = "failed"
            report.longrepr = _UNUSED
            report.qgate_error = True  # type: ignore[attr-defined]
        return
    from qgate.results import junit_properties, worst_first

    gates = [outcome.record for _, outcome in outcomes]
    path, line, _ = item.location
    about = {"node": item.nodeid, "seconds": report.duration, "file": path, "line": (line or 0) + 1}
    rows = [
        {**row, **about, "title": gate["title"], **_commands(item, row, gate)}
        for gate in gates
        for row in gate["rows"]
    ]
    if hasattr(report, "wasxfail"):
        rows = [{**row, "passed": True} for row in rows if row["checks"]]
    report.qgate = rows  # type: ignore[attr-defined]
    report.qgate_updated = sum(gate["updated"] for gate in gates)  # type: ignore[attr-defined]
    if rows:
        # JUnit takes them from the report of the teardown, which is made from the item.
        item.user_properties += junit_properties(worst_first(rows)[0])


def _commands(
    item: pytest.Item, row: Mapping[str, Any], gate: Mapping[str, Any]
) -> dict[str, dict[str, str]]:
    """What to type where a comparison failed, as the failure text has it."""
    if row["passed"]:
        return {}
    command = command_of(item.config, [f"{item.path}::{item.nodeid.partition('::')[2]}"])
    again = " ".join(filter(None, [command, gate["options"]]))
    return {"commands": {"again": again, "accept": gate["accept"]}}


def _tell_kept(item: pytest.Item, report: pytest.TestReport) -> None:
    """Leave or take back candidates: what an expected failure measured is nobody's proposal."""
    item.stash[_PASSED] = report.passed
    if hasattr(report, "wasxfail"):
        return
    folder = home_of(item.config) / OUT / "candidates"
    for session, outcome in item.stash[OUTCOMES]:
        try:
            session.leave_candidate(folder, outcome, item.nodeid)
        except QgateError as error:
            report.qgate_note = f"no candidate was left: {error}"  # type: ignore[attr-defined]


def _keep(item: pytest.Item, report: pytest.TestReport) -> None:
    """Make what a test measured part of the update, now that all of the test has passed."""
    dry = bool(item.config.getoption("qgate_update_dry_run"))
    if not (dry or (report.passed and item.stash.get(_PASSED, False))):
        return
    for session, outcome in item.stash[OUTCOMES]:
        try:
            session.keep(outcome, item.nodeid)
        except QgateError as error:
            conflicts_of(item.config).append(str(error))


class Reports:
    """Listens to reports; the process that talks to the user writes and sums up."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.worker = hasattr(config, "workerinput")
        self.records: dict[str, list[dict[str, Any]]] = {}
        self.attempts: dict[str, int] = {}
        self.gates: set[str] = set()
        self.parts: list[Part] = []
        self.others = Others()
        self.told = Told()
        self._writer: Any = None

    # Tests ----------------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The last report of a test counts: reruns replace what was before."""
        if self.worker:
            return
        self.others.hear(report)
        if not hasattr(report, "qgate_gate"):
            return
        if note := getattr(report, "qgate_note", ""):
            self.told.errors.append(note)
        node = report.nodeid
        if report.when == "setup":
            self.gates.add(node)
            self.attempts[node] = self.attempts.get(node, -1) + 1
            self.told.broken.pop(node, None)
        if report.failed and (report.when != "call" or hasattr(report, "qgate_error")):
            self.told.broken[node] = first_line(report)
        if report.when == "call" and hasattr(report, "qgate"):
            attempt = self.attempts.get(node, 0)
            self.records[node] = [{**row, "attempt": attempt} for row in report.qgate]
            self._append(self.records[node])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not self.worker:
            self.others.hear_collecting(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Any:
        if report.when == "call" and hasattr(report, "qgate_error"):
            return "error", "E", ("ERROR", {"red": True})
        if report.when == "call" and report.passed and getattr(report, "qgate_updated", None):
            return "updated", "U", ("UPDATED", {"yellow": True})
        return None

    # The end --------------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        if error:
            self.told.crashed.add(str(node.gateway.id))
        part = (getattr(node, "workeroutput", None) or {}).get(_KEY)
        if part is not None:
            self.parts.append(part)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the baselines once all gates have spoken, then the records."""
        stopped = session.shouldstop or session.shouldfail
        whole = int(exitstatus) in (0, 1) and not stopped
        part = part_of(self.config, whole and is_update(self.config))
        if self.worker:
            self.config.workeroutput[_KEY] = part  # type: ignore[attr-defined]
            return
        self.parts.append(part)
        found = self.told.selection = joined_selection(self.parts)
        if found.refused:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
            return
        self.told.underflow = underflow_lines(self.config, self.parts)
        self.told.errors += [error for each in self.parts for error in each["errors"]]
        if self.gates and whole and is_update(self.config) and self._may_write():
            try:
                self.told.changes, self.told.stale = write_updates(self.config, self.parts)
                self.told.updated = True
            except (QgateError, OSError) as error:
                self.told.errors.append(str(error))
        heard = self.records or self.told.broken or self.gates & set(self.others.lines)
        self.told.idle = bool(self.gates) and not heard
        self._settle(session)
        if self.gates:
            self._finish(whole, int(session.exitstatus))
            self._settle(session)

    def _settle(self, session: pytest.Session) -> None:
        """Nothing is green that could not be written, or that compared nothing."""
        if session.exitstatus == pytest.ExitCode.OK and self.told.errors:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        empty = self.told.selection.empty or self.told.idle
        if session.exitstatus == pytest.ExitCode.OK and empty:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def _may_write(self) -> bool:
        """An update is whole or not at all: a worker that went down took what it measured along."""
        if self.told.crashed:
            named = ", ".join(sorted(self.told.crashed))
            self.told.errors.append(
                f"worker {named} went down with what it had measured: no baseline was written. "
                "Run the update again."
            )
        return not self.told.errors

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.worker and not getattr(self.config.option, "no_summary", False):
            tell(terminalreporter, self.told, self._rows(), joined_facts(self.parts))

    # Records --------------------------------------------------------------------------------------

    def _rows(self) -> list[dict[str, Any]]:
        return [row for rows in self.records.values() for row in rows]

    def _append(self, rows: list[dict[str, Any]]) -> None:
        """Records as they come: a run that is killed leaves what it knew."""
        from qgate.results import Writer

        try:
            if self._writer is None:
                self._writer = Writer(self._records(), self._header(False, None))
            for row in rows:
                self._writer.append(row)
        except (QgateError, OSError) as error:
            if str(error) not in self.told.errors:
                self.told.errors.append(str(error))

    def _finish(self, whole: bool, status: int) -> None:
        """The same records, of the last attempts only, under a header that says it all; a page."""
        from qgate.results import to_csv, write_whole

        rows = self._rows()
        narrowed = any(part["narrowed"] for part in self.parts) or self.gates - set(self.records)
        complete = whole and not narrowed and is_complete(self.config, self.told)
        self.told.header = {"other": self.others.told(), "exit": status}
        if self._writer is not None:
            self._writer.close()
        try:
            if complete and not is_update(self.config) and shard_of(self.config) is None:
                self.told.unused = unused_lines(self.config, rows)
        except (QgateError, OSError) as error:
            self.told.errors.append(str(error))
        try:
            write_whole(self._records(), self._header(complete, status), rows)
            self.told.written = True
            to_csv(rows, self._folder() / "results.csv")
        except (QgateError, OSError) as error:
            self.told.errors.append(str(error))
            return
        if not value(self.config, "no-report"):
            self._draw(self._folder() / "report.html")

    def _draw(self, page: Path) -> None:
        """The page of the run; whatever keeps it from being made is told, and is not green."""
        from qgate.page.reports import write_page

        try:
            write_page(page, [self._run], plots=value(self.config, "plots"))
            self.told.page = page
        except Exception as error:
            text = str(error) if isinstance(error, QgateError | OSError) else repr(error)
            self.told.errors.append(f"{page.name} could not be made: {text}")

    def shown(self) -> Run | None:
        """The run as it was written; None where no gate ran, or nothing could be written."""
        try:
            return self._run if self.told.written else None
        except (QgateError, OSError):
            return None

    @cached_property
    def _run(self) -> Run:
        from qgate.page.runs import read_run

        return read_run(self._records())

    def _records(self) -> Path:
        return self._folder() / "results.jsonl"

    def _folder(self) -> Path:
        folder = home_of(self.config) / OUT
        folder.mkdir(exist_ok=True)
        self.told.folder = folder
        return folder

    def _header(self, complete: bool, status: int | None) -> dict[str, Any]:
        """What is known of the run; without a status it has not come to its end."""
        import torch

        from qgate.metrics import METRICS
        from qgate.results import new_header

        facts = joined_facts(self.parts or [part_of(self.config, False)])
        run = facts["run"]
        return new_header(
            torch=run.get("torch", str(torch.__version__)),
            device=run.get("device", value(self.config, "device")),
            seed=run.get("seed"),
            commit=run.get("commit"),
            command=[str(arg) for arg in self.config.invocation_params.args],
            modes=sorted({row["mode"] for row in self._rows()}),
            plans=facts["plans"],
            metrics=[metric.to_dict() for metric in METRICS],
            limits=[{"model": k, **limit} for k, v in facts["limits"].items() for limit in v],
            models=facts["models"],
            reference=value(self.config, "reference"),
            complete=complete and shard_of(self.config) is None,
            shard=self._shard(complete),
            exit=status,
            broken={node: text.partition("\n")[0] for node, text in self.told.broken.items()},
            errors=list(self.told.errors),
            notes=[*self.told.selection.notes, *self.told.unused, *self.told.underflow],
            other=self.others.told(),
            baselines=shown_baselines(self.config),
            update=self._update(),
        )

    def _shard(self, complete: bool) -> dict[str, Any] | None:
        """Which part of a divided run this is, and whether all of that part ran."""
        shard = shard_of(self.config)
        if shard is None:
            return None
        return {"number": shard[0], "of": shard[1], "complete": complete}

    def _update(self) -> dict[str, Any] | None:
        """What an update wrote, or would write; None where none was asked for."""
        if not is_update(self.config):
            return None
        return {
            "which": update_choice(self.config),
            "dry_run": bool(self.config.getoption("qgate_update_dry_run")),
            "done": self.told.updated,
            "entries": len(self.told.changes),
            "changes": self.told.changes[:_CHANGES],
            "stale": self.told.stale,
        }
