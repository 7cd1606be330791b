"""The options on pytest's command line: `--qgate-NAME` and, where nobody else has it, `--NAME`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

from qgate.loading import LateModule
from qgate.plugin.hooks import listed
from qgate.project.gate_kinds import known_options

if TYPE_CHECKING:
    import difflib
else:
    difflib = LateModule("difflib")


def dest(name: str) -> str:
    """Return the name that pytest keeps an option under."""
    return f"qgate_{name.replace('-', '_')}"


def typed_options(config: pytest.Config) -> dict[str, object]:
    """Return what the command line has of each option that it names."""
    typed = {name: config.getoption(dest(name)) for name in known_options()}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in typed.items()
        if value is not None
    }


def add_options(parser: pytest.Parser) -> None:
    about = "qgate: accuracy of quantization (each option also as --qgate-NAME)"
    hooks = "\n".join(f"  {line}" for line in listed())
    group = parser.getgroup("qgate", f"{about}; hooks for conftest.py:\n{hooks}")
    _add_long_names(group)


def _add_long_names(group: Any) -> None:
    """Add the options that the group has not; a conftest may have brought a kind of gate."""
    present = {option.dest for option in group.options}
    for name, option in known_options().items():
        if dest(name) not in present:
            group.addoption(f"--qgate-{name}", dest=dest(name), **option.argparse)


def add_short_names(parser: pytest.Parser) -> None:
    """Add the names that nobody else has; help then shows them instead of the long ones."""
    group = parser.getgroup("qgate")
    _add_long_names(group)
    long_names = {option.dest: option for option in group.options}
    for name, option in known_options().items():
        with contextlib.suppress(ValueError, argparse.ArgumentError):
            group.addoption(f"--{name}", dest=dest(name), **option.argparse)
            long_names[dest(name)].attrs()["help"] = argparse.SUPPRESS


def add_nearest_names(parser: pytest.Parser, words: Iterable[str]) -> None:
    """Let pytest's error about an unknown option name the nearest one of qgate."""
    names = [f"{dashes}{name}" for dashes in ("--", "--qgate-") for name in known_options()]
    typed = [word.partition("=")[0] for word in words if word.startswith("--")]
    near = {
        name: difflib.get_close_matches(name, names, n=1, cutoff=0.75)
        for name in typed
        if name not in names
    }
    if hints := [f"{nearest[0]} for {name}" for name, nearest in near.items() if nearest]:
        parser.extra_info["did you mean"] = ", ".join(hints)
