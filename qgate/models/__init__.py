"""Models to gate: what they are run on, where their tensors flow, how they are loaded.

A model knows neither that it is measured nor that it is quantized.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qgate.models.loading import Sampling, load, names
    from qgate.models.model import Model
    from qgate.models.sites import Site

__all__ = ["Model", "Sampling", "Site", "load", "names"]

_HOME = {
    "Model": "model",
    "Sampling": "loading",
    "Site": "sites",
    "load": "loading",
    "names": "loading",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"qgate.models.{_HOME[name]}"), name)
    raise AttributeError(f"module 'qgate.models' has no attribute {name!r}")
