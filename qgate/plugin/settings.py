"""What a project says of its gates: `qgate.toml`, or `[tool.qgate]` of its pyproject.toml.

Options by their names, with underscores, hold where the command line says nothing else; the table
`limits` is the policy. The folder of the file is where baselines are, and where results go.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from qgate.documents import toml
from qgate.errors import QgateError, unknown
from qgate.storage.places import text_below

NAME = "qgate.toml"
# What an option is: a type, or the texts that it may be.
Kind = type | tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """The folder that everything is relative to, the options, and the table of limits."""

    home: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


def read_settings(config: pytest.Config, kinds: Mapping[str, Kind]) -> Settings:
    """The settings of the project that the tests are of; `kinds` are the options there are."""
    here = config.invocation_params.dir
    asked = [Path(os.path.normpath(here / arg.partition("::")[0])) for arg in config.args]
    nearest = [home for path in asked if (home := home_above(path)) is not None]
    home = nearest[0] if nearest else config.rootpath
    made = Settings(home)
    for source, table in _tables(home):
        both = made.options.keys() & table.keys() | (
            {"limits"} & table.keys() if made.limits else set()
        )
        if both:
            raise pytest.UsageError(
                f"qgate: both {made.source} and {source} set {', '.join(sorted(both))}: keep one."
            )
        try:
            found = _checked(home, source, dict(table), kinds)
        except QgateError as error:
            raise pytest.UsageError(f"qgate: {source}: {error}") from None
        made = Settings(
            home, {**made.options, **found.options}, {**made.limits, **found.limits}, source
        )
    return made


def home_above(path: Path) -> Path | None:
    """The nearest folder at or above a path that has settings."""
    return next((folder for folder in (path, *path.parents) if _has_settings(folder)), None)


def _has_settings(folder: Path) -> bool:
    shared = folder / "pyproject.toml"
    return (folder / NAME).is_file() or (
        shared.is_file() and "[tool.qgate" in shared.read_text(encoding="utf-8", errors="replace")
    )


def _tables(home: Path) -> list[tuple[str, dict[str, Any]]]:
    own, shared = home / NAME, home / "pyproject.toml"
    tables = [(str(own), _parsed(own))] if own.is_file() else []
    if shared.is_file() and _has_settings(home):
        table = _parsed(shared).get("tool", {}).get("qgate")
        tables += [] if table is None else [(f"[tool.qgate] of {shared}", table)]
    return tables


def _parsed(file: Path) -> dict[str, Any]:
    try:
        return toml(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise pytest.UsageError(f"qgate: {file}: {error}") from None


def _checked(home: Path, source: str, table: dict[str, Any], kinds: Mapping[str, Kind]) -> Settings:
    limits = table.pop("limits", {})
    if not isinstance(limits, dict):
        raise QgateError(f"limits = {limits!r} is not allowed; it is a table.")
    options: dict[str, Any] = {}
    for name, value in table.items():
        if name not in kinds:
            raise unknown("key", name, [*kinds, "limits"])
        kind = kinds[name]
        made = value if isinstance(value, list) else [value]
        if kind is list and made and all(isinstance(each, str) and each for each in made):
            options[name] = made
        elif kind is float and type(value) in (int, float):
            options[name] = float(value)
        elif kind is Path and isinstance(value, str) and value:
            options[name] = text_below(home, value)
        elif _is_plain(value, kind):
            options[name] = value
        else:
            raise QgateError(f"{name} = {value!r} is not allowed; it is {_allowed(kind)}.")
    return Settings(home, options, limits, source)


def _is_plain(value: object, kind: Kind) -> bool:
    """Whether a value can be taken as it is; true is no whole number."""
    if isinstance(kind, tuple):
        return value in kind
    return kind in (int, str, bool) and type(value) is kind


def _allowed(kind: Kind) -> str:
    if isinstance(kind, tuple):
        return f"one of {', '.join(kind)}"
    return {list: "a text or a list of texts", Path: "a path", int: "a whole number",
            float: "a number", str: "a text", bool: "true or false"}[kind]  # fmt: skip
