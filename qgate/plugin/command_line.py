"""The options on pytest's command line: `--qgate-NAME` and, where nobody else has it, `--NAME`."""

from __future__ import annotations

import argparse
import contextlib

import pytest

from qgate.plugin.hooks import listed
from qgate.project.options import OPTIONS


def dest(name: str) -> str:
    """Return the name that pytest keeps an option under."""
    return f"qgate_{name.replace('-', '_')}"


def typed_options(config: pytest.Config) -> dict[str, object]:
    """Return what the command line has of each option that it names."""
    typed = {name: config.getoption(dest(name)) for name in OPTIONS}
    return {name: value for name, value in typed.items() if value is not None}


def add_options(parser: pytest.Parser) -> None:
    about = "qgate: accuracy of quantization (each also as --qgate-…)"
    hooks = "\n".join(f"  {line}" for line in listed())
    group = parser.getgroup("qgate", f"{about}; hooks for conftest.py:\n{hooks}")
    for name, option in OPTIONS.items():
        group.addoption(f"--qgate-{name}", dest=dest(name), **option.argparse)


def add_short_names(parser: pytest.Parser) -> None:
    """Add the names that nobody else has; help then shows them instead of the long ones."""
    group = parser.getgroup("qgate")
    long_names = {option.dest: option for option in group.options}
    for name, option in OPTIONS.items():
        with contextlib.suppress(ValueError, argparse.ArgumentError):
            group.addoption(f"--{name}", dest=dest(name), **option.argparse)
            long_names[dest(name)].attrs()["help"] = argparse.SUPPRESS
