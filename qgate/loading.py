"""Modules that are loaded when they are first used: of drawing, and of commands."""

from __future__ import annotations

import importlib
from typing import Any


class LateModule:
    """A module by its full name, imported when one of its names is first used.

    A file binds it once, and names the real module under TYPE_CHECKING.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
