"""Modes: what is quantized where, which of them fit a model, and the model put in one.

Listing and choosing modes does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qgate.modes.applying import Quantized, apply
    from qgate.modes.calibration import (
        Calibration,
        CalibrationSettings,
        calibrated,
        load_calibration,
        measure,
    )
    from qgate.modes.mode import Kernel, MambaChoices, Mode, Rule
    from qgate.modes.plan import Entry, Plan
    from qgate.modes.resolving import family_of, fitting_modes, make_plan, modes_of
    from qgate.modes.selection import GROUPS, find_mode, names, select

_HOME = {
    "Calibration": "calibration",
    "CalibrationSettings": "calibration",
    "Entry": "plan",
    "GROUPS": "selection",
    "Kernel": "mode",
    "MambaChoices": "mode",
    "Mode": "mode",
    "Plan": "plan",
    "Quantized": "applying",
    "Rule": "mode",
    "apply": "applying",
    "calibrated": "calibration",
    "family_of": "resolving",
    "find_mode": "selection",
    "fitting_modes": "resolving",
    "load_calibration": "calibration",
    "make_plan": "resolving",
    "measure": "calibration",
    "modes_of": "resolving",
    "names": "selection",
    "select": "selection",
}

__all__ = [
    "GROUPS",
    "Calibration",
    "CalibrationSettings",
    "Entry",
    "Kernel",
    "MambaChoices",
    "Mode",
    "Plan",
    "Quantized",
    "Rule",
    "apply",
    "calibrated",
    "family_of",
    "find_mode",
    "fitting_modes",
    "load_calibration",
    "make_plan",
    "measure",
    "modes_of",
    "names",
    "select",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"qgate.modes.{_HOME[name]}"), name)
    raise AttributeError(f"module 'qgate.modes' has no attribute {name!r}")
