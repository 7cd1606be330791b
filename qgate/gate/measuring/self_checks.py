"""Checks of the gate itself: the reference is unquantized, and a broken quantizer is seen."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList

from qgate.baselines import ReferenceTensor
from qgate.causes.casts import grid_scales
from qgate.errors import QgateError
from qgate.expected.modules import exact_product
from qgate.formats import Quantizer, observe
from qgate.gate import Measured
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.passes import capture_sites, float64_array
from qgate.hooks import ModuleHooks
from qgate.models import Model
from qgate.modes import Mode, Rule, apply

# Float32 sums in another order differ by this much; a quantizer is a million times further away.
NOISE = 1e-9
# More error than accepted that limits have to see in a block, also those for other arithmetic.
MORE_ERROR, MORE_ERROR_ELSEWHERE = 0.05, 1.0
_GROUP, _GROUPS, _FIRST = 16, 64, 4
# Codes of int4 and E2M1 are codes of these too, whatever their scale.
_GRIDS = ("int8", "fp8_e4m3", "fp8_e5m2")
_MOVED = 8
_STORED = ("weight", "qweight", "weight_packed", "_packed_params")
IDENTITY = Mode("identity", "nothing is quantized", rules=(Rule("", None, of="any"),))


def stored_reference(
    bench: Bench, basis: str, stored: dict[str, ReferenceTensor], live: dict[str, ReferenceTensor]
) -> list[Measured]:
    """Compare the reference on disk with one computed now."""
    if stored.keys() != live.keys():
        sites = sorted(stored.keys() ^ live.keys())
        raise QgateError(f"the reference of basis {basis} has other sites than now: {sites}.")
    rows = []
    for order, (site, actual) in enumerate(live.items()):
        expected = stored[site].values.astype(np.float64)
        value = _relative(actual.values.astype(np.float64), expected)
        rows.append(_exact(f"{basis} {site}", bench.layer_of(site), order, value))
    return rows


def unquantized(bench: Bench) -> list[Measured]:
    """Compare linear layers and convolutions of the reference with float64 products.

    A reference that runs through a quantizer anywhere cannot pass: one of qgate's is observed, any
    other one changes the product.
    """
    model = bench.model
    if calls := _quantized_calls(model):
        raise QgateError(
            f"the FP32 reference of {model.name} is quantized: one pass of it calls {calls} "
            "quantizers. Take the hooks off the module, or load it anew."
        )
    if parts := quantized_parts(model):
        raise QgateError(
            f"the FP32 reference of {model.name} is quantized: {parts}. Give the model with the "
            "weights that it was trained with."
        )
    products = [s.module for s in model.sites() if s.is_product and s.port == "output"]
    names = [f"{module}:{port}" for module in products for port in ("input", "output")]
    flowing = capture_sites(model, [s for s in model.sites() if s.name in names])
    rows = []
    for order, name in enumerate(products):
        module = model.module.get_submodule(name)
        # A parametrized weight, or one that is computed, is read as the module reads it.
        stored = module._parameters.get("weight")
        weight = module.weight if stored is None else stored
        assert isinstance(weight, Tensor)
        expected = exact_product(module, flowing[f"{name}:input"], weight)
        assert expected is not None
        value = _relative(float64_array(flowing[f"{name}:output"]), expected.cpu().numpy())
        rows.append(_exact(f"{name}:output", bench.layer_of(name), order, value))
    # Of a graph without products the run itself is all there is to compare.
    if not rows:
        first, second = (_outputs(model)["logits"] for _ in range(2))
        rows = [_exact("logits", "", 0, _relative(first, second))]
    return rows


def quantized_parts(model: Model) -> str:
    """Say which modules or weights of a reference are quantized; empty where none is."""
    modules = [name for name, module in model.module.named_modules() if _is_quantized(module)]
    if modules:
        kind = type(model.module.get_submodule(modules[0])).__name__
        return f"{len(modules)} of its modules are quantized, {modules[0]} ({kind}) first"
    products = [s for s in model.sites() if s.is_product and s.port == "weight"]
    on_grid = {}
    for site in products:
        weight = getattr(model.module.get_submodule(site.module), "weight", None)
        if isinstance(weight, Tensor) and (grid := weight_grid(weight, site.transposed)):
            on_grid[site.name] = grid
    if not on_grid:
        return ""
    first = next(iter(on_grid))
    return (
        f"{len(on_grid)} of {len(products)} weights are on a grid of "
        f"{on_grid[first]} already, {first} first"
    )


def _is_quantized(module: nn.Module) -> bool:
    """Tell if a module holds codes in place of numbers."""
    stored = [getattr(module, name, None) for name in _STORED]
    codes = [x for x in stored if isinstance(x, Tensor) and not x.is_floating_point()]
    # Quantized modules of torch return their weight by a method.
    is_method = callable(stored[0]) and not _is_norm(stored[0])
    return bool(codes) or is_method or stored[3] is not None


def _is_norm(weight: object) -> bool:
    """Tell if a weight is computed by torch itself from others, as in weight_norm."""
    return isinstance(weight, ParametrizationList) and all(
        type(step).__module__ == parametrizations.__name__ for step in weight
    )


def weight_grid(weight: Tensor, transposed: bool = False) -> str:
    """Name a format on whose grid all groups of a weight are, whatever their scales."""
    if weight.dim() < 2 or not weight.is_floating_point():
        return ""
    lines = float64_array(weight.transpose(0, 1) if transposed else weight)
    lines = lines.reshape(len(lines), -1)
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


def _quantized_calls(model: Model) -> int:
    """Count the quantizers that one pass of the model calls."""
    calls: list[str] = []
    with observe(lambda _x, quantizer: calls.append(str(quantizer))):
        _outputs(model)
    return len(calls)


def unread_weight(bench: Bench) -> str:
    """Name what does not change with a weight: the model, a product by itself, or nothing.

    A hundredth is added to every second output: what follows may normalize all of them. In the
    reference the effect of one weight may vanish, as that of queries whose scores are all small
    does, but not of all; in the output of its own product none does.
    """
    model = bench.model
    products = [s.module for s in model.sites() if s.is_product and s.port == "weight"]
    expected = _outputs(model)
    if not products:
        changed = copy.deepcopy(model.module)
        floats = [p for p in changed.parameters() if p.is_floating_point()]
        for parameter in floats:
            parameter.data *= 1 + 1e-2
        # What runs in another runtime has no parameter that could be changed.
        shows = not floats or _moved(_outputs(model.with_module(changed)), expected)
        return "" if shows else model.name
    for name in products[:: -max(1, len(products) // _MOVED)]:
        moved = apply(IDENTITY, model).model
        owner = moved.module.get_submodule(name)
        owner.weight = _changed(owner)
        if _moved(_outputs(moved), expected):
            return _unread_in_place(model, products)
    return model.name


def _unread_in_place(model: Model, products: list[str]) -> str:
    """Name the first product whose output stays when its weight changes; of zeros it may."""
    copied = apply(IDENTITY, model).model
    unread: list[str] = []

    def compare(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        weight = module.weight
        module.weight = _changed(module)
        same = torch.equal(module.forward(*args, **kwargs), output)
        module.weight = weight
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if same and any(x.any() for x in inputs) and name not in unread:
            unread.append(name)

    with ModuleHooks() as hooks:
        for name in products:
            module = copied.module.get_submodule(name)
            if isinstance(getattr(module, "weight", None), nn.Parameter):
                hooks.add(module, after=functools.partial(compare, name), named=True)
        _outputs(copied)
    return unread[0] if unread else ""


def _changed(module: nn.Module) -> nn.Parameter:
    weight = module.get_parameter("weight").detach().clone()
    weight[::2] *= 1 + 1e-2
    return nn.Parameter(weight)


def identity(bench: Bench) -> bool:
    """Tell if a plan that quantizes nothing changes no bit."""
    if not bench.model.sites():
        return True
    actual, expected = _outputs(apply(IDENTITY, bench.model).model), _outputs(bench.model)
    return actual.keys() == expected.keys() and all(
        np.array_equal(values, expected[name]) for name, values in actual.items()
    )


def _outputs(model: Model) -> dict[str, np.ndarray]:
    with torch.no_grad():
        outputs = model.outputs(model.inputs[0])
    return {name: tensor.float().cpu().numpy() for name, tensor in outputs.items()}


def _moved(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    """Tell if any output differs by more than noise; that of a detector may be masked."""
    return any(_relative(values, expected[name]) > NOISE for name, values in actual.items())


def worse_blocks(rows: list[Measured], share: float) -> list[Measured]:
    """Return blocks with more error than accepted, each as if what it measured were accepted."""
    return [
        replace(
            row,
            values={"relative_mse": error * (1 + share)},
            accepted={"relative_mse": error},
            gated=("relative_mse",),
            parts={},
            texts={},
        )
        for row in rows
        if (error := row.values["relative_mse"])
    ]


def _exact(site: str, layer: str, order: int, value: float) -> Measured:
    return Measured(
        site=site,
        layer=layer,
        scope="local",
        values={"relative_mse": value},
        order=order,
        nonfinite=int(not np.isfinite(value)),
        ideal={"relative_mse": 0.0},
        quantizer="fp32",
        floor=NOISE,
        gated=(),
    )


def _relative(actual: np.ndarray, expected: np.ndarray) -> float:
    energy = float(np.square(expected, dtype=np.float64).sum())
    error = float(np.square(actual - expected, dtype=np.float64).sum())
    return error / energy if energy else error
