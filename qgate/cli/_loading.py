"""Modules that a command loads only when it runs, so that `qgate --help` answers at once."""

from __future__ import annotations

import importlib
from typing import Any


class LateModule:
    """A module by its full name, imported when one of its names is first used.

    A command binds it once, and names the real module under TYPE_CHECKING.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
