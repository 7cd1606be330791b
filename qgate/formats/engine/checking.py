"""Checks of a tensor and the options of its quantizer, before anything is computed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qgate.errors import QgateError
from qgate.formats.engine.dtypes import INPUTS
from qgate.formats.settings import QuantizerSettings
from qgate.tensor_inputs import dense_tensor


def check(x: Any, q: QuantizerSettings) -> None:
    """Refuse a tensor that a quantizer cannot take, or whose options lie on another device."""
    dense_tensor(x, "quantize", INPUTS)
    if q.axis is not None:
        q.axis_of(x.dim())
    if q.groups is not None:
        q.groups.along(x.dim())
    if q.tile is not None and x.dim() < 2:
        raise QgateError(
            f"tiles of {q.block_words} need a tensor of two dimensions or more, not of shape "
            f"{tuple(x.shape)}."
        )
    if q.generator is None and q.scale is None:
        return
    for name, value in (("generator", q.generator), ("scale", q.scale)):
        device = getattr(value, "device", x.device)
        on_cpu_scalar = name == "scale" and isinstance(value, Tensor) and value.dim() == 0
        if device != x.device and not on_cpu_scalar:
            raise QgateError(f"the {name} is on {device} and x on {x.device}; put them together.")
