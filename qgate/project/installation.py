"""State of the packages that qgate needs, of those of its extras, and of pytest's plugins."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement

NAME = "pytest-qgate"
# What each extra is for. Extras that are not named here serve work on qgate itself.
PURPOSES = {
    "gate": "gates of models",
    "report": "pictures, tables and data frames",
    "checkpoints": "checkpoints in GGUF and ONNX, too",
    "dumps": "tensors that are collected",
    "ray": "--set engine=ray",
    "hf": "models at hf:PATH",
    "data": "texts from datasets and parquet files",
    "s3": "files and folders at s3://",
}


@dataclass(frozen=True)
class PackageState:
    """A package that is needed: in which versions, and which one is installed, if any."""

    name: str
    versions: str
    installed: str | None
    is_usable: bool

    @property
    def problem(self) -> str:
        """Say what is wrong, with nothing where the package can be used."""
        if self.is_usable:
            return ""
        state = "is missing" if self.installed is None else f"{self.installed} is installed"
        return f"{self.name} {state}, {self.name}{self.versions} is needed"


@dataclass(frozen=True)
class ExtraState:
    """An extra of qgate: what it is for, and its packages."""

    name: str
    purpose: str
    packages: tuple[PackageState, ...]

    @property
    def is_installed(self) -> bool:
        return all(package.is_usable for package in self.packages)

    @property
    def command(self) -> str:
        """Return what installs it."""
        return f"pip install '{NAME}[{self.name}]'"


def required_packages() -> list[PackageState]:
    """List the packages that qgate needs; none where it is not installed as a package."""
    return [_state(need) for need in _needs() if need.marker is None or need.marker.evaluate()]


def extras() -> list[ExtraState]:
    """List the extras that users of qgate may want."""
    return [
        ExtraState(name, purpose, tuple(map(_state, _needs_of_extra(name))))
        for name, purpose in PURPOSES.items()
        if _needs_of_extra(name)
    ]


def pytest_plugins() -> dict[str, str]:
    """Return the packages that bring plugins of pytest, with their versions."""
    points = importlib.metadata.entry_points(group="pytest11")
    return {point.dist.name: point.dist.version for point in points if point.dist is not None}


def version_of(name: str) -> str | None:
    """Return the installed version of a package, None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _needs() -> Iterator[Requirement]:
    try:
        texts = importlib.metadata.requires(NAME) or []
    except importlib.metadata.PackageNotFoundError:
        texts = []
    return map(Requirement, texts)


def _needs_of_extra(name: str) -> list[Requirement]:
    """List what an extra adds to the packages that qgate needs anyway."""
    return [
        need
        for need in _needs()
        if need.marker is not None
        and need.marker.evaluate({"extra": name})
        and not need.marker.evaluate()
    ]


def _state(need: Requirement) -> PackageState:
    version = version_of(need.name)
    is_usable = version is not None and need.specifier.contains(version, prereleases=True)
    return PackageState(need.name, str(need.specifier), version, is_usable)
