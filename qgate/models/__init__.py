"""Models to gate: their inputs, the sites where their tensors flow, and how they are loaded.

A model knows neither that it is measured nor that it is quantized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qgate.exports import lazy

if TYPE_CHECKING:
    from qgate.models.loading import Sampling, load, names
    from qgate.models.model import Model
    from qgate.models.sites import Site

__all__ = ["Model", "Sampling", "Site", "load", "names"]

__getattr__ = lazy(
    __name__,
    {
        "model": "Model",
        "loading": "Sampling load names",
        "sites": "Site",
    },
)
