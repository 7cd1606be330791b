"""Traces of quantization in a model that is taken for the FP32 reference."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from qgate.causes.casts import grid_scales
from qgate.formats import Quantizer
from qgate.gate.measuring.passes import float64_array
from qgate.models import Model

_GROUP, _GROUPS, _FIRST = 16, 64, 4
# Codes of int4 and E2M1 are codes of these too, whatever their scale.
_GRIDS = ("int8", "fp8_e4m3", "fp8_e5m2")
_STORED = ("weight", "qweight", "weight_packed", "_packed_params")


def quantized_parts(model: Model) -> str:
    """Say which modules or weights of a reference are quantized; empty where none is."""
    modules = [name for name, module in model.module.named_modules() if _is_quantized(module)]
    if modules:
        kind = type(model.module.get_submodule(modules[0])).__name__
        return f"{len(modules)} of its modules are quantized, {modules[0]} ({kind}) first"
    linears = [s for s in model.sites() if s.kind == "linear" and s.port == "weight"]
    on_grid = {}
    for site in linears:
        weight = getattr(model.module.get_submodule(site.module), "weight", None)
        if isinstance(weight, Tensor) and (grid := weight_grid(weight, site.transposed)):
            on_grid[site.name] = grid
    if not on_grid:
        return ""
    first = next(iter(on_grid))
    return (
        f"{len(on_grid)} of {len(linears)} weights of its linear layers are on a grid of "
        f"{on_grid[first]} already, {first} first"
    )


def _is_quantized(module: nn.Module) -> bool:
    """Tell if a module holds codes in place of numbers."""
    stored = [getattr(module, name, None) for name in _STORED]
    codes = [x for x in stored if isinstance(x, Tensor) and not x.is_floating_point()]
    # Quantized modules of torch return their weight by a method.
    return bool(codes) or callable(stored[0]) or stored[3] is not None


def weight_grid(weight: Tensor, transposed: bool = False) -> str:
    """Name a format on whose grid all groups of a weight are, whatever their scales."""
    if weight.dim() != 2 or not weight.is_floating_point():
        return ""
    lines = float64_array(weight.T if transposed else weight)
    width = lines.shape[1] // _GROUP * _GROUP
    groups = lines[:, :width].reshape(-1, _GROUP)
    groups = groups[:: max(1, len(groups) // _GROUPS)]
    # Zeros, or one magnitude with two signs, are on every grid.
    groups = groups[[len(np.unique(np.abs(row[row != 0]))) > 2 for row in groups]]
    if len(groups) < 2:
        return ""
    for name in _GRIDS:
        # Of a weight that is on no grid the first groups say so, and that is nearly every one.
        parts = groups[:_FIRST], groups[_FIRST:]
        if all(np.isfinite(grid_scales(part, Quantizer(name))).all() for part in parts):
            return name
    return ""
