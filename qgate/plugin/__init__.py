"""The pytest plugin: options, fixtures and reports of gates.

It loads in every pytest run of the environment, so it stays light: torch comes with the first test
that needs it.
"""

from __future__ import annotations

import pytest

from qgate._version import __version__
from qgate.plugin.cases import generate_cases, raise_refused, selected_formats
from qgate.plugin.gates import Gate, device, fmt, gate, layer, mode, model
from qgate.plugin.options import add_options, add_short_names, update_choice
from qgate.plugin.reporting import Reports, attach

__all__ = ["Gate", "device", "fmt", "gate", "layer", "mode", "model"]

_MARKERS = (
    "qgate: a gate of qgate (all tests that use the fixture `gate` have it)",
    "qgate_modes(names): modes of this test, whatever --mode says",
    "qgate_formats(names): formats of this test where --format does not say others",
    "limits(...): limits of this test: budget_db=, regression=, absolute=[...], sites=, reason=",
)


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
    wanted = config.getoption("qgate_format")
    if wanted is not None:
        selected_formats(wanted)
    update_choice(config)
    config.pluginmanager.register(Reports(config), "qgate-reports")


def pytest_report_header(config: pytest.Config) -> str:
    wanted = config.getoption("qgate_mode")
    told = [f"qgate: {__version__}"]
    if wanted:
        told.append(f"mode {','.join(wanted)}")
    if update_choice(config):
        told.append(f"updating baselines ({update_choice(config)})")
    return ", ".join(told)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    generate_cases(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config) -> None:
    raise_refused(config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):  # type: ignore[no-untyped-def]
    """What the gates of a test found travels with its report, across processes too."""
    report = yield
    attach(item, report)
    return report
