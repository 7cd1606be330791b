"""Captures: what flows at the sites of a model in one run, and how two runs differ."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qgate.capture.captures import Capture
    from qgate.capture.comparing import compare, compare_runs
    from qgate.capture.running import pick_sites, run

_HOME = {
    "Capture": "captures",
    "compare": "comparing",
    "compare_runs": "comparing",
    "pick_sites": "running",
    "run": "running",
}

__all__ = ["Capture", "compare", "compare_runs", "pick_sites", "run"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"qgate.capture.{_HOME[name]}"), name)
    raise AttributeError(f"module 'qgate.capture' has no attribute {name!r}")
