"""The repository that `qgate init` writes into, and what in it would get in the way."""

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
class RepositoryFolder:
    """A repository, and the folder in it that takes the suites."""

    root: Path
    into: PurePosixPath

    @property
    def suites(self) -> Path:
        return self.root / self.into

    def missing_folders(self) -> list[Path]:
        """The folders to make; of each path only the last, so that a slip makes no tree."""
        missing: list[Path] = []
        for folder in (self.root, self.suites):
            if os.path.lexists(folder) and not folder.is_dir():
                raise QgateError(f"{str(folder)!r} is no folder: give another, or move it away.")
            if not folder.exists():
                if not folder.parent.is_dir() and folder.parent not in missing:
                    raise QgateError(
                        f"there is no folder {str(folder.parent)!r} to make {folder.name!r} in: "
                        "make it first, or give another."
                    )
                missing.append(folder)
        return missing

    @cached_property
    def project(self) -> dict[str, Any]:
        """The pyproject.toml of the repository, empty if it has none."""
        file = self.root / "pyproject.toml"
        try:
            return toml((read_bytes(file) or b"").decode())
        except ValueError as error:
            raise QgateError(f"{str(file)!r} is no TOML: {error}. Mend it first.") from None

    def table(self, *names: str) -> dict[str, Any] | None:
        """A table of pyproject.toml, None if it has none of that name."""
        found: Any = self.project
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else None

    @property
    def shares(self) -> bool:
        """Whether the settings are in pyproject.toml, and no other file may have some."""
        return self.table("tool", "qgate") is not None

    @cached_property
    def taken(self) -> list[str]:
        """Names of options that the conftest.py of the repository has."""
        text = (read_bytes(self.root / "conftest.py") or b"").decode(errors="replace")
        return [name for name in _OPTIONS if re.search(f"""["']--{name}["']""", text)]

    @cached_property
    def overlooked(self) -> list[tuple[str, str, str]]:
        """Settings of pytest that hide the suites: name, value, and what it lacks."""
        found = []
        for name, (wanted, suite) in _NAMES.items():
            given = self._pytest_setting(name).split()
            # A function may also be named by how it starts.
            ways = [*given, *(f"{each}*" for each in given if name == "python_functions")]
            if given and not any(fnmatch(suite, way) for way in ways):
                found.append((name, " ".join(given), wanted))
        return found

    def _pytest_setting(self, name: str) -> str:
        """A setting of the one file that pytest takes them from, as words."""
        for file, section in _INI_FILES.items():
            if file == "tox.ini":
                tables = self.table("tool", "pytest", "ini_options"), self.table("tool", "pytest")
                for table in tables:
                    if table is not None:
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
        """Whether setuptools looks for packages beside pyproject.toml, and suites would be some."""
        backend = (self.table("build-system") or {}).get("build-backend", "setuptools")
        told = {"packages", "py-modules"} & set(self.table("tool", "setuptools") or {})
        others = [name for name in ("src", "setup.py", "setup.cfg") if (self.root / name).exists()]
        ours = self.table("project") is not None and str(backend).startswith("setuptools")
        return ours and not told and not others

    @cached_property
    def ignored(self) -> list[str]:
        """What git would leave out of the baselines to come."""
        recorded = [f"{BASELINES}/example/{name}" for name in _RECORDED]
        command = ["git", "-C", str(self.root), "check-ignore", *recorded]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return []
        return done.stdout.splitlines() if done.returncode == 0 else []


def inside(given: str) -> PurePosixPath:
    """The folder for the suites, as it is given: one in the repository."""
    path = Path(given)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise QgateError(
            f"--into {given!r} is not allowed; it is a folder in that of the repository, such as "
            "suites or tests/accuracy."
        )
    return PurePosixPath(path.as_posix())


def read_bytes(path: Path) -> bytes | None:
    """What is in a file, None if there is none; anything else of that name is in the way."""
    if os.path.lexists(path) and not path.is_file():
        raise QgateError(f"{str(path)!r} is to be a file and is none: move it away.")
    try:
        return path.read_bytes() if path.exists() else None
    except OSError as error:
        raise QgateError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
