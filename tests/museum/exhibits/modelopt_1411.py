"""Both halves of a fused weight got global scales of their own; the kernel has room for one.

An expert without calibration tokens took its largest magnitude from the gate's and the up's half
one by one. Serving fuses both into one product with the gate's global scale, so that the up half is
off by the ratio of both. The right way takes one magnitude of the whole tensor for both.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum import fp4
from tests.museum.exhibit import Exhibit

HALF = 32


def exported(part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decoded values but for the global scale, and the global scale."""
    encoded = qgate.encode(part, "nvfp4")
    assert encoded.scales is not None
    assert encoded.tensor_scale is not None
    scales = encoded.scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    return fp4.decode(encoded.codes) * scales, encoded.tensor_scale


def served(x: Tensor, values: Tensor, gate_scale: Tensor) -> Tensor:
    return linear(x, values) * gate_scale


def one_magnitude(x: Tensor, w: Tensor) -> Tensor:
    return served(x, *exported(w))


def two_magnitudes(x: Tensor, w: Tensor) -> Tensor:
    (gate, gate_scale), (up, _) = exported(w[:HALF]), exported(w[HALF:])
    return served(x, torch.cat([gate, up]), gate_scale)


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    w = torch.randn(2 * HALF, 64, generator=generator) / 8
    w[HALF:] *= 0.4
    return torch.randn(16, 64, generator=generator), w


EXHIBIT = Exhibit(
    "NVIDIA/Model-Optimizer#1411",
    "scales",
    "The halves of a fused weight had two global scales, and one of them was used for both.",
    "degenerate loops of tokens; one line of a log says that accuracy may be affected",
    "columns 32 to 63 of 64 .*are about 2.[0-9] times the expected: a scale of this part is off",
    arguments, one_magnitude, two_magnitudes, linear, {1: "nvfp4"},
    options={"relations": ["one"]}, terms=64,
)  # fmt: skip
