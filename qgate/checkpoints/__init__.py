"""Quantized checkpoints beside what they declare and the checkpoints that they were made from."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qgate.checkpoints.comparison import compare
    from qgate.checkpoints.record import CheckpointFinding, CheckpointRecord, WeightRecord

__all__ = ["CheckpointFinding", "CheckpointRecord", "WeightRecord", "compare"]


def __getattr__(name: str) -> Any:
    # Pages and texts of a record load no torch, which comparing needs.
    if name in __all__:
        home = "comparison" if name == "compare" else "record"
        return getattr(importlib.import_module(f"qgate.checkpoints.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
