"""The pytest plugin: options and fixtures for suites.

It loads in every pytest run of the environment, so it stays light: torch comes with the first test
that needs it.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Generator
from typing import Any

import pytest

from qgate._version import __version__
from qgate.errors import QgateError

_OPTIONS: dict[str, dict[str, Any]] = {
    "format": {
        "metavar": "NAMES",
        "action": "append",
        "help": "formats for the per-format suites, separated by commas; repeatable (default: all)",
    },
}


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    group = parser.getgroup("qgate", "qgate: accuracy of quantization (--format or --qgate-format)")
    for name, kwargs in _OPTIONS.items():
        group.addoption(f"--qgate-{name}", dest=f"qgate_{name}", **kwargs)
    if getattr(pluginmanager, "_conftest_plugins", None):
        # Loaded by a conftest: the turn of `pytest_load_initial_conftests` is over.
        _add_short_names(parser)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(parser: pytest.Parser) -> Generator[None, None, None]:
    """Short names last: a conftest or plugin that wants one of them has had it by now."""
    yield
    _add_short_names(parser)


def _add_short_names(parser: pytest.Parser) -> None:
    group = parser.getgroup("qgate")
    for name, kwargs in _OPTIONS.items():
        with contextlib.suppress(ValueError, argparse.ArgumentError):
            short = kwargs | {"help": f"short for --qgate-{name}"}
            group.addoption(f"--{name}", dest=f"qgate_{name}", **short)


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("qgate_format")
    if wanted is not None:
        selected_formats(wanted)


def pytest_report_header() -> str:
    return f"qgate: {__version__}"


@pytest.fixture
def fmt(request: pytest.FixtureRequest) -> str:
    """The name of a number format; the test runs once for each one selected."""
    return str(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _is_ours(metafunc, "fmt"):
        names = selected_formats(metafunc.config.getoption("qgate_format"))
        metafunc.parametrize("fmt", names, indirect=True)


def _is_ours(metafunc: pytest.Metafunc, name: str) -> bool:
    """If a test asks for this plugin's fixture: the name may be somebody else's, or a parameter."""
    found = metafunc._arg2fixturedefs.get(name)
    if not found or found[-1].func.__module__ != __name__:
        return False
    marks = metafunc.definition.iter_markers("parametrize")
    named = (mark.args[0] if mark.args else mark.kwargs.get("argnames", "") for mark in marks)
    split = (names.split(",") if isinstance(names, str) else names for names in named)
    return all(name not in [part.strip() for part in names] for names in split)


def selected_formats(wanted: list[str] | None) -> list[str]:
    """The names behind a comma-separated list of names and aliases, each once; without one, all."""
    from qgate import formats

    if wanted is None:
        return formats.names()
    names = ",".join(wanted)
    try:
        found = [formats.get(name).name for name in names.split(",")]
    except QgateError as error:
        raise pytest.UsageError(f"--format {names}: {error}") from None
    return list(dict.fromkeys(found))
