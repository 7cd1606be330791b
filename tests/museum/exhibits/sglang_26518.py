"""Queries were cast to FP8 without a scale, beside a cache that has one.

Attention over an FP8 cache takes FP8 queries and the product of three scales. Queries were cast as
they were, with a scale of 1: small ones become subnormal, large ones saturate at 448. The right way
divides them by a scale of their own first and hands it on. The report has the loss of quality; a
comment names the scale (2026-06-02), and #28144 is the fix.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import scaled_dot_product_attention as attention

import qgate
from tests.museum.exhibit import Exhibit

FP8 = qgate.Quantizer("fp8_e4m3", granularity="tensor")


def fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()


def kernel(q: Tensor, q_scale: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with FP8 codes; scales are applied to the results of both products."""
    k_scale, v_scale = (x.abs().max() / 448 for x in (k, v))
    width = q.shape[-1] ** -0.5
    logits = fp8(q, q_scale) @ fp8(k, k_scale).mT * (q_scale * k_scale * width)
    return logits.softmax(-1) @ fp8(v, v_scale) * v_scale


def own_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernel(q, q.abs().max() / 448, k, v)


def scale_of_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernel(q, torch.tensor(1.0), k, v)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, 2, 16, 32, generator=generator) for _ in range(3))
    return q / 20, k * 20, v


EXHIBIT = Exhibit(
    "sgl-project/sglang#26518",
    "calibration",
    "Queries were cast to FP8 with a scale of 1 beside a calibrated cache.",
    "worse answers of a 26B model with NVFP4 weights",
    "argument 0 is cast to fp8_e4m3 without a scale",
    arguments, own_scale, scale_of_one, attention, {0: FP8, 1: FP8, 2: FP8},
    options={"relations": ["permuted"]},
)  # fmt: skip
