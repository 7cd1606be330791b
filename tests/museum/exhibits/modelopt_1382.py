"""A search for scales looked for quantizers under a name that fused experts do not have.

Quantizers of fused experts are a list whose name ends in `s`. The calibration asked for the name
without it, found none, and ran no iteration: every expert kept the scales of its largest weights, and
nothing said so but a progress bar with `0it`. It is the first of several defects of the report,
whose weights are NVFP4; here they are INT4.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit

NAMES = ["gate_up_proj_weight_quantizers"]
INT4 = qgate.Quantizer("int4", granularity="block", block=64)


def cast(groups: Tensor, share: Tensor) -> Tensor:
    scales = groups.abs().amax(-1, keepdim=True) * share / 7
    return (groups / scales).round().clamp(-7, 7) * scales


def calibrated(w: Tensor, is_quantizer: object) -> Tensor:
    """Quantize with the shares of the largest magnitudes that leave the smallest errors."""
    groups = w.unflatten(1, (-1, 64))
    best = torch.ones(*groups.shape[:2], 1)
    for _name in filter(is_quantizer, NAMES):  # type: ignore[arg-type]
        shares = torch.linspace(0.25, 1.25, 101)
        tried = [cast(groups, torch.full_like(best, float(share))) for share in shares]
        errors = torch.stack([(values - groups).square().sum(-1) for values in tried])
        best = shares[errors.argmin(0)][..., None]
    return cast(groups, best).flatten(1)


def any_number(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, calibrated(w, lambda name: "weight_quantizer" in name))


def single_ones(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, calibrated(w, lambda name: name == "gate_up_proj_weight_quantizer"))


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 128, generator=generator), torch.randn(32, 128, generator=generator) / 11


EXHIBIT = Exhibit(
    "NVIDIA/Model-Optimizer#1382", "calibration",
    "A search for scales skipped all fused experts, whose quantizers it did not find.",
    "20,480 quantizers were skipped silently",
    "scales of argument 1 were not searched for .scale amax/7 explains all values",
    arguments, any_number, single_ones, linear, {1: INT4},
    options={"convention": "mse"}, terms=128,
)  # fmt: skip
