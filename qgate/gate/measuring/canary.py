"""The quantizers of the canary: one as it should be, and one that truncates."""

from __future__ import annotations

from dataclasses import replace

import torch

from qgate.expected.distances import relative_error
from qgate.formats import Quantizer
from qgate.formats.definition import quantize as define
from qgate.gate.measured import Measured
from qgate.gate.measuring.passes import float64_array, shortened
from qgate.gate.measuring.site_errors import site_errors
from qgate.models import Model
from qgate.modes import Mode, Rule

_MXFP8 = Rule(":(input|weight)$", "mxfp8_e4m3", of="product")
HEALTHY = Mode("canary", "MXFP8 as it should be", rules=(_MXFP8,))
BROKEN = replace(
    HEALTHY, about="MXFP8 that truncates", rules=(replace(_MXFP8, options={"rounding": "zero"}),)
)


def quantized_outputs(model: Model, mode: Mode) -> list[Measured]:
    """Quantize the outputs of a model in which no product is seen, as a canary mode does."""
    healthy, quantizer = (
        Quantizer(str(rule.format), **rule.options) for rule in (HEALTHY.rules[0], mode.rules[0])
    )
    with torch.no_grad():
        outputs = model.outputs(shortened(model.inputs[0]))
    rows = []
    for order, (name, tensor) in enumerate(outputs.items()):
        tensor = tensor.detach().float()
        ideal = relative_error(define(float64_array(tensor), healthy), tensor)
        row = site_errors(name, "", "local", order, [(quantizer(tensor), tensor)], ideal=ideal)
        rows.append(replace(row, gated=()))
    return rows
