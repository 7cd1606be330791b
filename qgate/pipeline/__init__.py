"""Where the parts meet: from files, models and modes to records."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qgate.pipeline.model_portrait import ModelFigures, model_figures
    from qgate.pipeline.setups import ModelSetup
    from qgate.sweeps.requests import Request, sweep_file

_HOME = {
    "ModelFigures": "model_portrait",
    "ModelSetup": "setups",
    "Request": "sweep_files",
    "model_figures": "model_portrait",
    "sweep_file": "sweep_files",
}

__all__ = ["ModelFigures", "ModelSetup", "Request", "model_figures", "sweep_file"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"qgate.pipeline.{_HOME[name]}"), name)
    raise AttributeError(f"module 'qgate.pipeline' has no attribute {name!r}")
