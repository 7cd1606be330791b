"""What is installed, read once: each run of pytest inside a test would ask all packages again."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from typing import Any

import pytest


class KnownPackage:
    """A package that keeps what it answered."""

    def __init__(self, package: importlib.metadata.Distribution) -> None:
        self._package = package

    @cached_property
    def entry_points(self) -> Any:
        return self._package.entry_points

    @cached_property
    def files(self) -> Any:
        return self._package.files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._package, name)


@contextlib.contextmanager
def known_packages() -> Iterator[None]:
    """Keep the packages of `site-packages`; those of other folders are read as ever."""
    read = importlib.metadata.distributions

    @lru_cache
    def kept(folder: str) -> list[KnownPackage]:
        return [KnownPackage(package) for package in read(path=[folder])]

    def distributions(**context: Any) -> Iterable[Any]:
        if context:
            yield from read(**context)
            return
        for folder in dict.fromkeys(sys.path):
            installed = folder.endswith("site-packages")
            yield from kept(folder) if installed else read(path=[folder])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.metadata.distributions", distributions)
        yield
