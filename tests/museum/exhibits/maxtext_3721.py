"""A training step set every NaN of a gradient to zero, which hid that the run had diverged.

The line came with an unrelated change and was meant for FP8 scales; it went over all gradients.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import qgate
from tests.museum.exhibit import Exhibit

FP8 = qgate.Quantizer("fp8_e4m3", granularity="tensor")


def weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    return dy.T @ x


def as_it_is(x: Tensor, dy: Tensor) -> Tensor:
    return weight_gradient(FP8(x), FP8(dy))


def cleaned(x: Tensor, dy: Tensor) -> Tensor:
    return as_it_is(x, dy).nan_to_num(0.0)


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(24, 32, generator=generator)
    return x, torch.randn(24, 16, generator=generator) / 64


EXHIBIT = Exhibit(
    "AI-Hypercomputer/maxtext#3721",
    "rollout",
    "A training step with FP8 set every NaN of its gradients to zero.",
    "hides divergence behind the appearance of a stable run",
    "for one NaN .*: .* NaN of the definition became finite numbers",
    arguments, as_it_is, cleaned, weight_gradient, {0: FP8, 1: FP8},
    options={"relations": ["nan"]}, terms=24,
)  # fmt: skip
