"""Modes: the quantizers of a model's sites, the choice of modes that fit, and the quantized model.

Listing and choosing modes does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qgate.exports import lazy

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
    from qgate.modes.plan import Plan, PlanEntry
    from qgate.modes.resolving import family_of, fitting_modes, make_plan, misfit_of, modes_of
    from qgate.modes.selection import GROUPS, find_mode, names, select

__all__ = [
    "GROUPS",
    "Calibration",
    "CalibrationSettings",
    "Kernel",
    "MambaChoices",
    "Mode",
    "Plan",
    "PlanEntry",
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
    "misfit_of",
    "modes_of",
    "names",
    "select",
]

__getattr__ = lazy(
    __name__,
    {
        "calibration": "Calibration CalibrationSettings calibrated load_calibration measure",
        "plan": "Plan PlanEntry",
        "selection": "GROUPS find_mode names select",
        "mode": "Kernel MambaChoices Mode Rule",
        "applying": "Quantized apply",
        "resolving": "family_of fitting_modes make_plan misfit_of modes_of",
    },
)
