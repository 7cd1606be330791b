"""What a project says of its gates: `qgate.toml`, or `[tool.qgate]` of its pyproject.toml.

Options by their names, with underscores, hold where the command line says nothing else; the table
`limits` is the policy. The folder of the file is where baselines are, and where results go.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from qgate.errors import QgateError, unknown

NAME = "qgate.toml"


@dataclass(frozen=True)
class Settings:
    """The folder that everything is relative to, the options, and the table of limits."""

    home: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


def read_settings(config: pytest.Config, kinds: Mapping[str, type]) -> Settings:
    """The settings of the project that the tests are of; `kinds` are the options there are."""
    home = _home(config)
    own, shared = home / NAME, home / "pyproject.toml"
    tables = []
    if own.is_file():
        tables.append((str(own), _parsed(own)))
    if shared.is_file() and "tool.qgate" in shared.read_text(encoding="utf-8", errors="replace"):
        table = _parsed(shared).get("tool", {}).get("qgate")
        tables += [] if table is None else [(f"[tool.qgate] of {shared}", table)]
    if len(tables) > 1:
        raise pytest.UsageError(
            f"qgate: both {tables[0][0]} and {tables[1][0]} set options: keep one of them."
        )
    if not tables:
        return Settings(home)
    source, table = tables[0]
    try:
        return _checked(home, source, dict(table), kinds)
    except QgateError as error:
        raise pytest.UsageError(f"qgate: {source}: {error}") from None


def _home(config: pytest.Config) -> Path:
    """The root of the project; else the nearest folder above the tests that has the file."""
    root = config.rootpath
    asked = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    above = [folder for path in asked for folder in (path, *path.parents)]
    return next((folder for folder in (root, *above) if (folder / NAME).is_file()), root)


def _parsed(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise pytest.UsageError(f"qgate: {file}: {error}") from None


def _checked(home: Path, source: str, table: dict[str, Any], kinds: Mapping[str, type]) -> Settings:
    limits = table.pop("limits", {})
    if not isinstance(limits, dict):
        raise QgateError(f"limits = {limits!r} is not allowed; it is a table.")
    options: dict[str, Any] = {}
    for name, value in table.items():
        if name not in kinds:
            raise unknown("key", name, [*kinds, "limits"])
        kind = kinds[name]
        made = value if isinstance(value, list) else [value]
        if kind is list and all(isinstance(each, str) for each in made):
            options[name] = made
        elif kind is float and type(value) in (int, float):
            options[name] = float(value)
        elif kind is Path and isinstance(value, str):
            options[name] = str(home / value)
        elif kind in (int, str) and type(value) is kind:
            options[name] = value
        else:
            allowed = {list: "a text or a list of texts", Path: "a path", int: "a whole number",
                       float: "a number", str: "a text"}[kind]  # fmt: skip
            raise QgateError(f"{name} = {value!r} is not allowed; it is {allowed}.")
    return Settings(home, options, limits, source)
