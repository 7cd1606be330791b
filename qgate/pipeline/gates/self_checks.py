"""Proof that the gate looks at something: the reference is what it claims, and a break is seen."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qgate.baselines import ReferenceTensor
from qgate.errors import QgateError
from qgate.formats import observe
from qgate.gate import Measured
from qgate.models import Model
from qgate.modes import Mode, Rule, apply
from qgate.pipeline.gates.bench import Bench
from qgate.pipeline.gates.passes import capture_sites, short_layer

# What float32 sums in another order are apart; a quantizer is a million times further away.
NOISE = 1e-9
HEALTHY = Mode("canary", "MXFP8 as it should be", rules=(Rule(":(input|weight)$", "mxfp8_e4m3"),))
BROKEN = Mode(
    "canary",
    "MXFP8 that truncates",
    rules=(Rule(":(input|weight)$", "mxfp8_e4m3", options={"rounding": "zero"}),),
)
IDENTITY = Mode("identity", "nothing is quantized", rules=(Rule("", None, of="any"),))


def stored_reference(
    bench: Bench, basis: str, stored: dict[str, ReferenceTensor], live: dict[str, ReferenceTensor]
) -> list[Measured]:
    """The reference on disk against one computed now."""
    if stored.keys() != live.keys():
        apart = sorted(stored.keys() ^ live.keys())
        raise QgateError(f"the reference of basis {basis} has other sites than now: {apart}.")
    found = []
    for order, (site, kept) in enumerate(stored.items()):
        value = _relative(live[site].values.astype(np.float64), kept.values.astype(np.float64))
        layer = short_layer(bench.model.layer_of(site.partition(":")[0]))
        found.append(_exact(f"{basis} {site}", layer, order, value))
    return found


def unquantized(bench: Bench) -> list[Measured]:
    """Every linear layer of the reference against the product of its parameters in float64.

    A reference that runs through a quantizer anywhere cannot pass, whoever put it there: one of
    qgate's is seen at work, another one shows in the product.
    """
    model = bench.model
    if calls := _quantized_calls(model):
        raise QgateError(
            f"the FP32 reference of {model.name} is quantized: one pass of it calls {calls} "
            "quantizers. Take the hooks off the module, or load it anew."
        )
    linears = [s.module for s in model.sites() if s.kind == "linear" and s.port == "output"]
    names = [f"{module}:{port}" for module in linears for port in ("input", "output")]
    flowing = capture_sites(model, [s for s in model.sites() if s.name in names])
    found = []
    for order, name in enumerate(linears):
        module = model.module.get_submodule(name)
        parameters = dict(module.named_parameters(recurse=False))
        weight = _array(parameters["weight"])
        x, y = _array(flowing[f"{name}:input"]), _array(flowing[f"{name}:output"])
        turned = type(module).__name__ == "Conv1D"
        expected = x @ (weight if turned else weight.T)
        if "bias" in parameters and type(module).__name__ != "StepProjection":
            expected = expected + _array(parameters["bias"])
        layer = short_layer(model.layer_of(name))
        found.append(_exact(f"{name}:output", layer, order, _relative(y, expected)))
    return found


def _quantized_calls(model: Model) -> int:
    """How often a pass of the model quantizes something."""
    seen: list[str] = []
    with observe(lambda _x, quantizer: seen.append(str(quantizer))):
        _logits(model)
    return len(seen)


def perturbation_shows(bench: Bench) -> bool:
    """Whether a change of one weight by a thousandth moves the reference by more than the noise."""
    model = bench.model
    moved = apply(IDENTITY, model).model
    name = next(s.module for s in model.sites() if s.kind == "linear" and s.port == "weight")
    owner = moved.module.get_submodule(name)
    before = owner.get_parameter("weight")
    owner.weight = torch.nn.Parameter(before.detach() * (1 + 1e-3))
    return _relative(_logits(moved), _logits(model)) > NOISE


def identity(bench: Bench) -> bool:
    """Whether a plan that quantizes nothing changes no bit."""
    return bool(np.array_equal(_logits(apply(IDENTITY, bench.model).model), _logits(bench.model)))


def _logits(model: Model) -> np.ndarray:
    with torch.no_grad():
        return model(model.inputs[0]).float().cpu().numpy()


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


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().astype(np.float64)
