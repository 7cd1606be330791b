"""Reports of a run's tests: outcomes of gates, and of other tests, which count too.

Pytest is red for any test that fails. A test with a gate is among the others where it failed by
something else: an assertion of its own, a strict xfail that passed.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping

import pytest

from qgate.errors import QgateError
from qgate.plugin import lazy
from qgate.plugin.runs import (
    COMPUTING,
    OUTCOMES,
    Selection,
    SuiteRun,
    out_folder_notes,
    part_of,
    sessions_used,
)
from qgate.text import one_line

_CHECK_FAILURE = "qgate.testing.CheckFailure: "
_UNUSED = "the gate of this test was never asked: nothing was compared"


def attach(item: pytest.Item, report: pytest.TestReport) -> None:
    """Put the records of a gate on the report of its call, which crosses processes.

    What was raised while a gate computed makes the test an error. The first line is all that the
    short summary and JUnit show, and needs no name of an exception, also of `check_kernel`.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = crash.message.removeprefix(_CHECK_FAILURE)
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
        lazy.records.keep(item, report, outcomes)
        return
    lazy.records.leave_files(item, report, outcomes)
    if report.failed and item.stash.get(COMPUTING, False):
        report.qgate_error = True  # type: ignore[attr-defined]
    if outcomes:
        lazy.records.add_rows(item, report, [outcome.record for _, outcome in outcomes])
    elif report.passed and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", _UNUSED
        report.qgate_error = True  # type: ignore[attr-defined]


def add_report(run: SuiteRun, report: pytest.TestReport) -> None:
    """Keep the records of a gate, and how other tests ended."""
    node, is_gate = report.nodeid, hasattr(report, "qgate_gate")
    if report.when == "setup":
        run.others.pop(node, None)
        run.lines.pop(node, None)
    if not is_gate or (report.failed and not _is_recorded(report)):
        add_other(run, report)
    if not is_gate:
        return
    run.errors += getattr(report, "qgate_notes", [])
    if report.when == "setup":
        run.gates.add(node)
        run.attempts[node] = run.attempts.get(node, -1) + 1
        run.broken.pop(node, None)
        run.skips.pop(node, None)
    if report.when == "call":
        run.called.add(node)
    if report.when != "teardown" and report.skipped:
        run.skips[node] = _skip(report)
    if report.failed and (report.when != "call" or hasattr(report, "qgate_error")):
        run.broken[node] = _first_line(report)
    if report.when == "call" and hasattr(report, "qgate"):
        attempt = run.attempts.get(node, 0)
        run.records[node] = [{**row, "attempt": attempt} for row in report.qgate]
        lazy.records.append(run, run.records[node])


def _skip(report: pytest.TestReport) -> tuple[str, str]:
    """Return the cause and the reason of a gate that was skipped, or failed as expected."""
    if hasattr(report, "wasxfail"):
        return "xfailed", one_line(str(report.wasxfail).removeprefix("reason: "))
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return "skipped", one_line(text.removeprefix("Skipped: ").removeprefix("Skipped"))


def add_other(run: SuiteRun, report: pytest.TestReport | pytest.CollectReport) -> None:
    """Keep how a test that is no gate ended, or that a file could not be collected."""
    if report.failed:
        run.others[report.nodeid] = "failed"
        run.lines.setdefault(report.nodeid, _first_line(report))
    elif report.when == "call" or report.skipped:
        # A part of a test says nothing of the whole.
        run.others.setdefault(report.nodeid, "skipped" if report.skipped else "passed")


def _is_recorded(report: pytest.TestReport) -> bool:
    """Return True if a failed gate has a record, False if it has no verdict."""
    if report.when != "call" or hasattr(report, "qgate_error"):
        return True
    return any(not row["passed"] for row in getattr(report, "qgate", ()))


def _first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the first line of a failure, also without a crash, as of a missing fixture."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if message := getattr(crash, "message", ""):
        return str(message)
    lines = str(report.longrepr).splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return next(iter([*errors, *lines]), "")


# The end ----------------------------------------------------------------------------------------


def finish(run: SuiteRun, session: pytest.Session, exitstatus: int) -> None:
    """Write the baselines once all gates have spoken, then the records."""
    if _is_half_loaded("torch"):
        return
    config, options = session.config, run.options
    stopped = session.shouldstop or session.shouldfail
    whole = int(exitstatus) in (0, 1) and not stopped
    updates = whole and options.update is not None
    used = sessions_used(config)
    part = lazy.records.measured_part(config, updates) if used else part_of(config)
    if hasattr(config, "workerinput"):
        config.workeroutput["qgate"] = part  # type: ignore[attr-defined]
        return
    run.parts.append(part)
    run.selection = _joined_selection(run)
    run.selection.notes += out_folder_notes(config) if run.gates else []
    if run.selection.refused:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
        return
    if options.run.watch_underflow:
        watch = lazy.underflow.Watch()
        for site in (site for part in run.parts for site in part["underflow"]):
            watch.add(lazy.underflow.WatchedSite.from_dict(site))
        run.underflow = watch.lines()
    run.errors += [error for part in run.parts for error in part["errors"]]
    if run.gates and updates and _may_write(run):
        try:
            lazy.records.update_baselines(run)
        except (QgateError, OSError) as error:
            run.errors.append(str(error))
    answered = run.records or run.broken or run.gates & set(run.lines)
    run.idle = whole and bool(run.gates) and not answered
    gates = any(any(part["gates"].values()) for part in run.parts) or _may_lack_gates(run)
    if gates and not config.getoption("collectonly", False):
        stopped_by = "" if whole else _stopped_by(session)
        run.extent = lazy.records.run_extent(run, stopped_by, int(exitstatus))
        facts = lazy.records.joined_facts(run.parts)
        run.header = {"extent": run.extent, "shard": options.shard}
        names = ("power", "tasks", "across_weights")
        run.header |= {name: getattr(facts, name) for name in names}
    _settle(run, session)
    if run.gates:
        if lazy.records.write(run, whole, int(session.exitstatus)):
            lazy.summary.draw(run)
        _settle(run, session)


def _may_lack_gates(run: SuiteRun) -> bool:
    """Tell if a run of suites that collected no gate may have had some: there are baselines."""
    return run.options.baselines.is_dir() and run.options.asks_for_gates


def _is_half_loaded(package: str) -> bool:
    """Tell whether Ctrl-C cut off its import: another one would crash the process."""
    return package not in sys.modules and f"{package}._C" in sys.modules


def _joined_selection(run: SuiteRun) -> Selection:
    """Return what was left out, as one worker tells it: all of them collect the same.

    Notes come from all of them: some are made where a gate ran.
    """
    selections = [part["selection"] for part in run.parts]
    joined = dict.fromkeys(note for _, notes, *_ in selections for note in notes)
    for refused, notes, empty, unasked in selections:
        if refused or notes or unasked:
            return Selection([*refused], notes=[*joined], empty=empty, unasked={**unasked})
    return Selection()


def _may_write(run: SuiteRun) -> bool:
    """An update is whole or not at all: a worker that went down took what it measured along."""
    if run.crashed:
        run.errors.append(
            f"worker {', '.join(sorted(run.crashed))} went down with what it had measured: no "
            "baseline was written. Run the update again."
        )
    return not run.errors


def _stopped_by(session: pytest.Session) -> str:
    """Write why a session ended before its tests did."""
    return one_line(str(session.shouldfail or session.shouldstop or "the run was interrupted"))


def _settle(run: SuiteRun, session: pytest.Session) -> None:
    """Nothing is green that could not be written, compared nothing, or is partial in CI."""
    if session.exitstatus == pytest.ExitCode.OK and run.errors:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if session.exitstatus == pytest.ExitCode.OK and (run.selection.empty or run.idle):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    if session.exitstatus == pytest.ExitCode.OK and run.extent and run.extent["fails"]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if session.exitstatus == pytest.ExitCode.OK and any(map(_is_failure, run.rows)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _is_failure(row: Mapping[str, object]) -> bool:
    """Tell if a gate found something wrong, which no hook on reports may take back."""
    return not row["passed"] and "xfailed" not in row


def settle(run: SuiteRun, session: pytest.Session) -> None:
    """Settle the exit status again after the hooks of others, and leave a receipt of it."""
    if hasattr(session.config, "workerinput"):
        return
    _settle(run, session)
    if run.receipt is not None:
        status = {"exit": int(session.exitstatus)}
        with contextlib.suppress(OSError):  # without a receipt the run is red
            run.receipt.write_text(json.dumps(status), encoding="utf-8", newline="\n")
