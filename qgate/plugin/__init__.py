"""The pytest plugin: options, fixtures and reports of gates.

It loads in every pytest run of the environment, so it stays light: torch comes with the first test
that needs it.
"""

from __future__ import annotations

import pytest

from qgate.devices import wait_calmly
from qgate.plugin import hooks
from qgate.plugin.cases import check_formats, generate_cases
from qgate.plugin.dumping import check_dump, has_fixture, leave_out
from qgate.plugin.gates import (
    DumpGate,
    Gate,
    activation_gate,
    device,
    dump_gate,
    dump_layer,
    fmt,
    gate,
    layer,
    mode,
    model,
)
from qgate.plugin.options import add_options, add_short_names, update_choice
from qgate.plugin.reporting import Reports, attach
from qgate.plugin.selection import note_left, selection_of, sort_out
from qgate.plugin.sharding import deal, shard_of
from qgate.plugin.telling import header_line
from qgate.plugin.watching import start_watching

__all__ = [
    "DumpGate",
    "Gate",
    "activation_gate",
    "device",
    "dump_gate",
    "dump_layer",
    "fmt",
    "gate",
    "layer",
    "mode",
    "model",
]

_GATES = ("gate", "dump_gate", "activation_gate")
_MARKERS = (
    "qgate: a gate of qgate (all tests that use `gate`, `dump_gate` or `activation_gate` have it)",
    "qgate_modes(names): modes of this test, whatever --mode says",
    "qgate_formats(names): formats of this test where --format does not say others",
    "limits(...): limits of this test: budget_db=, regression=, absolute=[...], sites=, reason=",
)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hooks)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    add_options(parser)
    if getattr(pluginmanager, "_conftest_plugins", None):
        # Loaded by a conftest: the turn of `pytest_load_initial_conftests` is over.
        add_short_names(parser)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(parser: pytest.Parser):  # type: ignore[no-untyped-def]
    """Short names last: a conftest or plugin that wants one of them has had it by now."""
    result = yield
    add_short_names(parser)
    return result


def pytest_configure(config: pytest.Config) -> None:
    for line in _MARKERS:
        config.addinivalue_line("markers", line)
    if header_line(config) is not None:
        wait_calmly()
    check_formats(config)
    check_dump(config)
    update_choice(config)
    shard_of(config)
    start_watching(config)
    reports = Reports(config)
    config.pluginmanager.register(reports, "qgate-reports")
    if config.getoption("htmlpath", None):
        from qgate.plugin.html_columns import HtmlColumns, is_wanted

        if is_wanted(config):
            config.pluginmanager.register(HtmlColumns(config, reports), "qgate-html")


def pytest_report_header(config: pytest.Config) -> str | None:
    return header_line(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    generate_cases(metafunc)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that use a fixture of ours that judges are gates, for `-m qgate` and for reports."""
    if any(has_fixture(item, name) for name in _GATES):
        item.add_marker(pytest.mark.qgate)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out(config, items)
    sort_out(config, items)
    deal(config, items, selection_of(config))


def pytest_collection_finish(session: pytest.Session) -> None:
    note_left(session.config, session.items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):  # type: ignore[no-untyped-def]
    """What the gates of a test found travels with its report, across processes too."""
    report = yield
    attach(item, report)
    return report
