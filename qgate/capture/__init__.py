"""Captures of the tensors at the sites of a model, and errors between two runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qgate.exports import lazy

if TYPE_CHECKING:
    from qgate.capture.comparing import compare, compare_runs
    from qgate.capture.running import Capture, pick_sites, run

__all__ = ["Capture", "compare", "compare_runs", "pick_sites", "run"]

__getattr__ = lazy(
    __name__,
    {
        "comparing": "compare compare_runs",
        "running": "Capture pick_sites run",
    },
)
