"""The pytest plugin: options and fixtures for suites.

It loads in every pytest run of the environment, so it stays light: torch comes with the first test
that needs it.
"""

from __future__ import annotations

from typing import Any

import pytest

from qgate._version import __version__
from qgate.errors import QgateError


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("qgate", "qgate: accuracy of quantization")
    kwargs: dict[str, Any] = {
        "metavar": "NAMES",
        "dest": "qgate_format",
        "help": "formats for the per-format suites, separated by commas (default: all)",
    }
    try:
        group.addoption("--format", "--qgate-format", **kwargs)
    except ValueError:
        group.addoption("--qgate-format", **kwargs)


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("qgate_format")
    if wanted is not None:
        selected_formats(wanted)


def pytest_report_header() -> str:
    return f"qgate: {__version__}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fmt" in metafunc.fixturenames:
        metafunc.parametrize("fmt", selected_formats(metafunc.config.getoption("qgate_format")))


def selected_formats(wanted: str | None) -> list[str]:
    """The names behind a comma-separated list of names and aliases, each once; without one, all."""
    from qgate import formats

    if wanted is None:
        return formats.names()
    try:
        found = [formats.get(name).name for name in wanted.split(",")]
    except QgateError as error:
        raise pytest.UsageError(f"--format {wanted}: {error}") from None
    return list(dict.fromkeys(found))
