"""The error that an ideal quantizer of the declared format makes at each site.

The ideal comes from the readable definitions, not from the code under test: of a tensor by the
definition of its format, of a linear layer's output by multiplying ideally quantized weight and
input, and of a Mamba block by the plain model of that block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from qgate.formats import Quantizer
from qgate.formats.definition import quantize as define
from qgate.models import Model, Site
from qgate.models.mamba.hadamard import matrix
from qgate.models.mamba.network import MambaMixer
from qgate.modes import Calibration, Mode, Plan
from qgate.modes import definition as mamba_block

Array = npt.NDArray[Any]

# Sites of a mixer, and what the plain model of the block calls them.
TAPS = {
    "in_proj:input": "n",
    "conv1d:input": "x",
    "x_proj:input": "a",
    "scan:u": "u",
    "scan:dt": "delta",
    "scan:B": "B",
    "scan:C": "C",
    "scan:z": "z",
    "scan:output": "scan",
    "out_proj:input": "h",
    "out_proj:output": "out",
}
_MADE = ("output", "state")
_SCALES = {
    "s_n": "in_proj:input",
    "s_z": "in_proj:output",
    "s_u": "x_proj:input",
    "s_x": "x_proj:output",
    "s_d": "dt_proj:output",
    "s_h": "scan:state",
    "s_o": "out_proj:input",
}


def ideal_tensors(
    mode: Mode,
    plan: Plan,
    reference: Model,
    flowing: Mapping[str, Tensor],
    calibration: Calibration | None,
) -> dict[str, Array]:
    """Site -> what an ideal quantizer makes of it, given the reference's tensors."""
    if mode.choices is not None and calibration is not None:
        return _mamba(mode.name, reference, flowing, calibration)
    quantizers = plan.quantizers()
    if mode.dtype is not None:
        name = {"float16": "fp16", "bfloat16": "bf16"}[mode.dtype]
        cast = Quantizer(name)
        head = set(reference.head or ())
        quantizers = {
            s.name: cast for s in reference.sites() if s.kind == "linear" and s.module not in head
        }
    return _linears(reference, quantizers, flowing)


def _linears(
    reference: Model, quantizers: Mapping[str, Quantizer], flowing: Mapping[str, Tensor]
) -> dict[str, Array]:
    found: dict[str, Array] = {}
    made: dict[tuple[str, int], Array] = {}
    for site in reference.sites():
        if site.name in quantizers and site.port not in _MADE and site.name in flowing:
            # Query, key and value read one tensor, and the definition is slow.
            quantizer, values = quantizers[site.name], _array(flowing[site.name])
            key = (repr(quantizer), hash(values.tobytes()))
            if key not in made:
                made[key] = define(values, quantizer)
            found[site.name] = made[key]
    for site in reference.sites():
        if site.kind == "linear" and site.port == "output":
            product = _product(reference, site, found, flowing)
            if product is not None:
                own = quantizers.get(site.name)
                found[site.name] = product if own is None else _cast(product, own)
    return found


def _product(
    reference: Model, site: Site, ideal: Mapping[str, Array], flowing: Mapping[str, Tensor]
) -> Array | None:
    """A linear layer's output from its ideal input and weight, None where neither is quantized."""
    names = [f"{site.module}:{port}" for port in ("input", "weight")]
    if not any(name in ideal for name in names) or any(name not in flowing for name in names):
        return None
    x, w = (ideal[n] if n in ideal else _array(flowing[n]) for n in names)
    module = reference.module.get_submodule(site.module)
    y = x @ (w if site.transposed else w.T)
    bias = getattr(module, "bias", None)
    separate = type(module).__name__ == "StepProjection"
    return y if bias is None or separate else y + _array(bias)


def _cast(values: Array, quantizer: Quantizer) -> Array:
    return define(values.astype(np.float32).astype(np.float64), quantizer)


def _array(tensor: Tensor) -> Array:
    return tensor.detach().float().cpu().numpy().astype(np.float64)


def _mamba(
    mode: str, reference: Model, flowing: Mapping[str, Tensor], calibration: Calibration
) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for layer in reference.layers:
        mixer = reference.module.get_submodule(f"{layer}.mixer")
        if not isinstance(mixer, MambaMixer):
            raise TypeError(f"{layer}.mixer is {type(mixer).__name__}")
        at = f"{layer}.mixer"
        scales = {name: calibration[f"{at}.{site}"].scale for name, site in _SCALES.items()}
        scales["s_u1"] = calibration[f"{at}.x_proj:input"].wide or scales["s_u"]
        hidden = flowing[f"{layer}:input"].detach().float().cpu().numpy()
        h = matrix(mixer.D.numel()).float().numpy()
        taps = mamba_block.block(mode, mixer_weights(mixer), scales, hidden, h)
        found |= {f"{at}.{site}": taps[tap] for site, tap in TAPS.items()}
    return found


def mixer_weights(mixer: MambaMixer) -> dict[str, Array]:
    """The weights of a rotated mixer as the plain model of the block names them."""
    parts: dict[str, Tensor | nn.Parameter] = {
        "in_proj": mixer.in_proj.weight,
        "conv_weight": mixer.conv1d.weight[:, 0],
        "x_proj": mixer.x_proj.weight,
        "dt_proj": mixer.dt_proj.weight,
        "dt_bias": mixer.dt_proj.bias,
        "A_log": mixer.A_log,
        "D": mixer.D,
        "out_proj": mixer.out_proj.weight,
    }
    if mixer.conv1d.bias is not None:
        parts["conv_bias"] = mixer.conv1d.bias
    weights = {name: tensor.detach().float().cpu().numpy() for name, tensor in parts.items()}
    weights.setdefault("conv_bias", np.zeros(mixer.D.numel(), np.float32))
    return weights
