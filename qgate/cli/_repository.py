"""The repository that `qgate init` writes into, and its settings that would hide the suites."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from configparser import ConfigParser
from configparser import Error as ConfigError
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from qgate.documents import toml
from qgate.errors import QgateError
from qgate.storage.foreign import MOST_SETTINGS, read_foreign

BASELINES = "baselines"
# Options that a repository is likely to have one of its own for.
_OPTIONS = ("mode", "model", "format", "layers", "device", "samples", "update-baselines")
# What git has to take: a file of each kind that a baseline consists of.
_RECORDED = ("manifest.json", "accepted/my_int8.txt", "reference-plain.safetensors")
# Where pytest looks for its settings beside pyproject.toml, which comes after the first two.
_INI_FILES = {
    "pytest.ini": "pytest",
    ".pytest.ini": "pytest",
    "tox.ini": "pytest",
    "setup.cfg": "tool:pytest",
}
# How pytest may be told to call tests, and a suite that has to be called so.
_NAMES = {
    "python_files": ("test_*.py", "test_task.py"),
    "python_functions": ("test_*", "test_task"),
}


@dataclass(frozen=True)
class NewFile:
    """A file to write; `ours` if users are not meant to edit it."""

    path: Path
    content: bytes
    ours: bool = True


@dataclass(frozen=True)
class RepositoryFolder:
    """A repository, and the folder in it for the suites."""

    root: Path
    into: PurePosixPath

    @property
    def suites(self) -> Path:
        return self.root / self.into

    @property
    def has_baselines(self) -> bool:
        """Tell whether baselines of a model are recorded already."""
        return any((self.root / BASELINES).glob("*/manifest.json"))

    def missing_folders(self) -> list[Path]:
        """List the folders to make; only the last of a path, so that a typo makes no tree."""
        missing: list[Path] = []
        for folder in (self.root, self.suites):
            if os.path.lexists(folder) and not folder.is_dir():
                raise QgateError(
                    f"{str(folder)!r} is no folder: name another one, or move that file away."
                )
            if not folder.exists():
                if not folder.parent.is_dir() and folder.parent not in missing:
                    raise QgateError(
                        f"cannot make {folder.name!r}, as there is no folder "
                        f"{str(folder.parent)!r}: make that first, or name another one."
                    )
                missing.append(folder)
        return missing

    @cached_property
    def project(self) -> dict[str, object]:
        """Read the pyproject.toml of the repository; empty if it has none."""
        file = self.root / "pyproject.toml"
        try:
            return toml((read_bytes(file) or b"").decode())
        except ValueError as error:
            raise QgateError(
                f"{str(file)!r} is not valid TOML: {error}. Correct it first."
            ) from None

    def table(self, *names: str) -> dict[str, object] | None:
        """Return a table of pyproject.toml, None if it has none of that name."""
        table: Any = self.project
        for name in names:
            table = table.get(name) if isinstance(table, dict) else None
        return table if isinstance(table, dict) else None

    @property
    def has_settings(self) -> bool:
        """Tell if the settings are in pyproject.toml, which excludes a qgate.toml."""
        return self.table("tool", "qgate") is not None

    @cached_property
    def conftest_options(self) -> list[str]:
        """List the options of qgate that the conftest.py of the repository defines too."""
        text = (read_bytes(self.root / "conftest.py") or b"").decode(errors="replace")
        return [name for name in _OPTIONS if re.search(f"""["']--{name}["']""", text)]

    @cached_property
    def hiding_settings(self) -> list[tuple[str, str, str]]:
        """List settings of pytest that hide the suites: name, value, and the missing pattern."""
        hiding = []
        for name, (missing, example) in _NAMES.items():
            patterns = self.pytest_setting(name).split()
            # A function may also be named by how it starts.
            prefix = "*" if name == "python_functions" else ""
            matching = [*patterns, *(pattern + prefix for pattern in patterns)]
            if patterns and not any(fnmatch(example, pattern) for pattern in matching):
                hiding.append((name, " ".join(patterns), missing))
        return hiding

    def pytest_setting(self, name: str) -> str:
        """Read a setting from the one file that pytest reads, as words."""
        for file, section in _INI_FILES.items():
            options = self.table("tool", "pytest", "ini_options")
            table = self.table("tool", "pytest") if options is None else options
            if file == "tox.ini" and table is not None:
                value = table.get(name, "")
                return " ".join(map(str, value)) if isinstance(value, list) else str(value)
            parser = ConfigParser(interpolation=None, strict=False)
            with contextlib.suppress(ConfigError):
                parser.read_string((read_bytes(self.root / file) or b"").decode(errors="replace"))
            if parser.has_section(section):
                return parser.get(section, name, fallback="")
        return ""

    @property
    def finds_packages(self) -> bool:
        """Tell if setuptools discovers packages by itself, and would take the suites for one."""
        backend = (self.table("build-system") or {}).get("build-backend", "setuptools")
        stated = {"packages", "py-modules"} & set(self.table("tool", "setuptools") or {})
        layouts = [name for name in ("src", "setup.py", "setup.cfg") if (self.root / name).exists()]
        is_setuptools = self.table("project") is not None and str(backend).startswith("setuptools")
        return is_setuptools and not stated and not layouts

    @cached_property
    def ignored_baselines(self) -> list[str]:
        """List paths of future baselines that git would ignore."""
        recorded = [f"{BASELINES}/example/{name}" for name in _RECORDED]
        command = ["git", "-C", str(self.root), "check-ignore", *recorded]
        try:
            done = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="surrogateescape",
                check=False, timeout=10,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return []
        return done.stdout.splitlines() if done.returncode == 0 else []


def suites_folder(into: str) -> PurePosixPath:
    """Check the folder for the suites: it has to be inside the repository."""
    path = Path(into)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise QgateError(
            f"--into {into!r} is not allowed; give a folder inside the repository, relative to its "
            "root, such as suites or tests/accuracy."
        )
    return PurePosixPath(path.as_posix())


def read_bytes(path: Path) -> bytes | None:
    """Read a file, None if there is none; refuse anything else of that name."""
    if os.path.lexists(path) and not path.is_file():
        raise QgateError(f"{str(path)!r} exists and is no file: move it away.")
    try:
        return read_foreign(path, "settings", MOST_SETTINGS) if path.exists() else None
    except OSError as error:
        raise QgateError(
            f"{str(path)!r} cannot be read: {error.strerror}. Make it readable first."
        ) from None
