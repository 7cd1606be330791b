"""The pytest plugin: options, fixtures and reports of gates.

It loads in every pytest run of the environment, so it stays light: torch comes with the first test
that needs it. Below are its hooks, in the order in which pytest calls them.
"""

from __future__ import annotations

import qgate.plugin.plain_imports  # noqa: F401  (first, for the imports that follow)

# isort: split
import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from qgate.plugin import hooks, lazy
from qgate.plugin.collection import Cases, group_of, note_running, select
from qgate.plugin.fixtures import (
    SuiteGate,
    device,
    fixtures_of,
    fmt,
    layer,
    mode,
    model,
    qgate_check,
    qgate_check_kernel,
    qgate_check_relations,
)
from qgate.plugin.gate_collection import FileHooks, gates_of, is_gate, kind_of_gate
from qgate.plugin.holding_back import hold_back
from qgate.plugin.progress_lines import grouped_by_mode, name_lines
from qgate.plugin.reports import add_other, add_report, attach, finish, settle
from qgate.plugin.runs import (
    WATCH,
    SuiteRun,
    end_worker_without_device,
    note_loss,
    refuse_without_device,
    reserve_out_folder,
    tell_worker_folder,
)
from qgate.plugin.settings import (
    add_nearest_names,
    add_options,
    add_short_names,
    note_environment,
    options_of,
)
from qgate.plugin.shared_sessions import check_sample_files
from qgate.plugin.used_formats import selected_formats
from qgate.project.gate_kinds import gate_kinds
from qgate.project.run_words import RECEIPT
from qgate.text import for_terminal, one_line

__all__ = [
    "SuiteGate",
    "device",
    "fmt",
    "layer",
    "mode",
    "model",
    "qgate_check",
    "qgate_check_kernel",
    "qgate_check_relations",
]

_MARKERS = (
    "qgate: a gate of qgate (all tests that use a fixture of qgate whose name ends in `gate`)",
    "qgate_modes(names): modes of this test, whatever --mode says",
    "qgate_formats(names): formats of this test where --format does not say others",
    "qgate_used_formats: leave out formats that no gate of the run quantizes with",
    "limits(...): limits of this test: budget_db=, regression=, absolute=[...], sites=, reason=",
)
_RUN: pytest.StashKey[SuiteRun] = pytest.StashKey()


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hooks)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    add_options(parser)
    if getattr(pluginmanager, "_conftest_plugins", None):
        # Loaded by a conftest: the turn of `pytest_load_initial_conftests` is over.
        add_short_names(parser)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(  # type: ignore[no-untyped-def]
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
):
    """Add short names last: a conftest or plugin that wants one of them has had it by now."""
    note_environment(early_config)
    result = yield
    add_short_names(parser)
    add_nearest_names(parser, args)
    return result


def pytest_configure(config: pytest.Config) -> None:
    """Read the options and refuse what cannot be meant, before anything is collected."""
    for line in _MARKERS:
        config.addinivalue_line("markers", line)
    options = options_of(config)
    if options.header is not None:
        lazy.devices.wait_calmly()
        lazy.devices.keep_freed_memory()
    if "format" in options.given:
        selected_formats(options.run.format)
    options.check()
    check_sample_files(config)
    if options.run.update_baselines:
        updating = lazy.updating.UPDATING
        token = updating.set(True)
        config.add_cleanup(lambda: updating.reset(token))
    if options.run.watch_underflow:
        stack = contextlib.ExitStack()
        watch = lazy.underflow.watch_underflow(lambda _text: None)
        config.stash[WATCH] = stack.enter_context(watch)
        config.add_cleanup(stack.close)
    config.pluginmanager.register(fixtures_of(gate_kinds()), "qgate-kinds")
    config.pluginmanager.register(FileHooks(config), "qgate-files")
    run = config.stash[_RUN] = SuiteRun(options)
    # Taken out, so that a run of pytest inside a test leaves none.
    if receipt := os.environ.pop(RECEIPT, ""):
        run.receipt = Path(receipt)
    if not hasattr(config, "workerinput"):
        if options.header is not None:
            reserve_out_folder(config, options.home)
        config.pluginmanager.register(_ReportHooks(run), "qgate-reports")
        if config.getoption("htmlpath", None) and config.pluginmanager.hasplugin("html"):
            config.pluginmanager.register(lazy.html_columns.HtmlColumns(run), "qgate-html")


def pytest_report_header(config: pytest.Config) -> str | None:
    header = options_of(config).header
    return None if header is None else for_terminal(one_line(header))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    Cases(metafunc).generate()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector):  # type: ignore[no-untyped-def]
    """Note all gates of a file, also those that node ids leave out."""
    result = yield
    for item in result if isinstance(result, list) else [result]:
        if isinstance(item, pytest.Item) and kind_of_gate(item) is not None:
            gates_of(collector.config).note(item)
    return result


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests that use a fixture of ours that judges, for `-m qgate` and for reports."""
    if kind_of_gate(item) is not None:
        item.add_marker(pytest.mark.qgate)
        gates_of(item.config).reached.add(id(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):  # type: ignore[no-untyped-def]
    """Select before anything else deselects; hold back gates once nothing else is deselected."""
    select(config, items)
    with grouped_by_mode(items):
        result = yield
    if any(map(is_gate, items)):
        hold_back(config, items)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    note_running(session.config, session.items)
    name_lines(session.config, session.items)
    if hasattr(session.config, "workerinput") and any(map(is_gate, session.items)):
        lazy.dealing.write_groups(session.config, [group_of(item) for item in session.items])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    refuse_without_device(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):  # type: ignore[no-untyped-def]
    result = yield
    if nextitem is not None:
        end_worker_without_device(item.config)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """Let what the gates of a test decided travel with its report, across processes too."""
    if call.excinfo is not None:
        note_loss(item, call.excinfo.value)
    report = yield
    attach(item, report)
    return report


class _ReportHooks:
    """Hooks of the process that talks to the user."""

    def __init__(self, run: SuiteRun) -> None:
        self._run = run

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a report; the last one of a test counts, reruns replace what was before."""
        add_report(self._run, report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session):  # type: ignore[no-untyped-def]
        """Have the last word on the exit status, after the summary and hooks of others."""
        result = yield
        settle(self._run, session)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any):  # type: ignore[no-untyped-def]
        """Give pytest the failures back that it does not list, to be counted."""
        result = yield
        terminalreporter.stats.get("failed", []).extend(self._run.unlisted)
        return result

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            add_other(self._run, report)


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> Any:
    if report.when == "call" and hasattr(report, "qgate_error"):
        return "error", "E", ("ERROR", {"red": True})
    if hasattr(report, "qgate_cause"):
        return "failed", "F", (f"FAILED {report.qgate_cause} -", {"red": True})
    if report.when == "call" and report.passed and getattr(report, "qgate_updated", None):
        return "updated", "U", ("UPDATED", {"yellow": True})
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    tell_worker_folder(node.config, node.workerinput)
    if options_of(node.config).header is not None:
        lazy.dealing.tell_worker(node.config, node.workerinput)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return lazy.dealing.scheduling_of(config, log) if options_of(config).header else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Take what a worker of pytest-xdist knew, or note that it went down."""
    run = node.config.stash[_RUN]
    if error:
        run.crashed.add(str(node.gateway.id))
    part = (getattr(node, "workeroutput", None) or {}).get("qgate")
    if part is not None:
        run.parts.append(part)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    run = session.config.stash[_RUN]
    try:
        finish(run, session, exitstatus)
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if run.records and reporter is not None:
            failed = reporter.stats.get("failed", [])
            lazy.summary.shorten(run, failed, reporter._tw.fullwidth)
            lazy.summary.count_written(run, reporter.stats)
    except KeyboardInterrupt:
        session.exitstatus = pytest.ExitCode.INTERRUPTED
        run.errors.append(
            "interrupted while files were written: each is old or new, and baselines are all old "
            "or all new. Run it again."
        )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    run = config.stash[_RUN]
    quiet = hasattr(config, "workerinput") or getattr(config.option, "no_summary", False)
    if not quiet and run.has_news:
        lazy.summary.tell(terminalreporter, run)
        lazy.summary.short_summary(run, terminalreporter.stats.get("failed", []))
