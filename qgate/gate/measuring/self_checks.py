"""Checks of the gate itself: the reference is unquantized, and a broken quantizer is seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from qgate.baselines import ReferenceTensor
from qgate.errors import QgateError
from qgate.formats import observe
from qgate.gate import Measured
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.passes import capture_sites, float64_array
from qgate.gate.measuring.reference_checks import quantized_parts
from qgate.models import Model
from qgate.modes import Mode, Rule, apply

# Float32 sums in another order differ by this much; a quantizer is a million times further away.
NOISE = 1e-9
# More error than accepted that limits have to see in a block, also those for other arithmetic.
MORE_ERROR, MORE_ERROR_ELSEWHERE = 0.05, 1.0
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
    """Compare every linear layer of the reference with the float64 product of its parameters.

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
    linears = [s.module for s in model.sites() if s.kind == "linear" and s.port == "output"]
    names = [f"{module}:{port}" for module in linears for port in ("input", "output")]
    flowing = capture_sites(model, [s for s in model.sites() if s.name in names])
    rows = []
    for order, name in enumerate(linears):
        module = model.module.get_submodule(name)
        parameters = dict(module.named_parameters(recurse=False))
        weight = float64_array(parameters["weight"])
        x, y = float64_array(flowing[f"{name}:input"]), float64_array(flowing[f"{name}:output"])
        turned = type(module).__name__ == "Conv1D"
        expected = x @ (weight if turned else weight.T)
        if "bias" in parameters and type(module).__name__ != "StepProjection":
            expected = expected + float64_array(parameters["bias"])
        layer = bench.layer_of(name)
        rows.append(_exact(f"{name}:output", layer, order, _relative(y, expected)))
    return rows


def _quantized_calls(model: Model) -> int:
    """Count the quantizers that one pass of the model calls."""
    calls: list[str] = []
    with observe(lambda _x, quantizer: calls.append(str(quantizer))):
        _logits(model)
    return len(calls)


def perturbation_shows(bench: Bench) -> bool:
    """Tell if a change of one weight by a thousandth moves the reference by more than the noise."""
    model = bench.model
    moved = apply(IDENTITY, model).model
    name = next(s.module for s in model.sites() if s.kind == "linear" and s.port == "weight")
    owner = moved.module.get_submodule(name)
    before = owner.get_parameter("weight")
    owner.weight = torch.nn.Parameter(before.detach() * (1 + 1e-3))
    return _relative(_logits(moved), _logits(model)) > NOISE


def identity(bench: Bench) -> bool:
    """Tell if a plan that quantizes nothing changes no bit."""
    return bool(np.array_equal(_logits(apply(IDENTITY, bench.model).model), _logits(bench.model)))


def _logits(model: Model) -> np.ndarray:
    with torch.no_grad():
        return model(model.inputs[0]).float().cpu().numpy()


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
