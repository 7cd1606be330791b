"""The shared expert was divided by the routed experts' scaling factor, and not multiplied by it.

It runs fused as one more routed expert. Where the whole sum is multiplied by the factor afterwards,
its weight is one over the factor; on the aiter path the factor is in the routed weights already.
The report names no format; the one here is ours.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit

FACTOR = 2.5


def mixed(x: Tensor, weights: Tensor, routed: Tensor, shared: Tensor) -> Tensor:
    y = torch.einsum("te,tk,enk->tn", weights * FACTOR, x, routed)
    return y + linear(x, shared)


def fp8(*tensors: Tensor) -> list[Tensor]:
    return [qgate.quantize(tensor, "mxfp8") for tensor in tensors]


def whole(x: Tensor, weights: Tensor, routed: Tensor, shared: Tensor) -> Tensor:
    x, routed, shared = fp8(x, routed, shared)
    return mixed(x, weights, routed, shared)


def divided(x: Tensor, weights: Tensor, routed: Tensor, shared: Tensor) -> Tensor:
    x, routed, shared = fp8(x, routed, shared)
    experts = torch.cat([routed, shared[None]])
    fused = torch.cat([weights * FACTOR, torch.full((len(x), 1), 1 / FACTOR)], 1)
    return torch.einsum("te,tk,enk->tn", fused, x, experts)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.randn(10, 64, generator=generator)
    weights = torch.rand(10, 4, generator=generator)
    routed, shared = (torch.randn(*n, 64, generator=generator) / 8 for n in ((4, 16), (16,)))
    return x, weights / weights.sum(1, keepdim=True), routed, shared


EXHIBIT = Exhibit(
    "sgl-project/sglang#28237",
    "experts",
    "The shared expert was divided by a factor, and nothing multiplied it back.",
    "0.4 of the shared expert's output; GSM8K 0.960 → 0.950, long outputs never end",
    "argument 3 counts 0.4 times in the result",
    arguments, whole, divided, mixed, {0: "mxfp8", 2: "mxfp8", 3: "mxfp8"},
    options={"relations": ["one"]},
)  # fmt: skip
