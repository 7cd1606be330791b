"""Straight-through gradients: quantization differentiates as the identity inside its range."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgate.formats.engine import quantizing
from qgate.formats.engine.job import Job, saturated, split
from qgate.formats.quantizer import Quantizer


class StraightThrough(torch.autograd.Function):
    """Passes the gradient, except where x saturated (unless told to pass it there too)."""

    @staticmethod
    def forward(x: Tensor, q: Quantizer) -> Tensor:
        return quantizing.forward(Job(x, q))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Quantizer], output: Tensor) -> None:
        del output
        x, q = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(inside_range(x, q) if q.saturated_grad == "zero" else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        grad = grads[0].to(ctx.dtype)
        return (grad if inside is None else grad.masked_fill(~inside, 0.0)), None


def inside_range(x: Tensor, q: Quantizer) -> Tensor:
    """Find where x does not saturate; NaN does not."""
    job = Job(x, q, looking=True)
    layout = job.layout
    inside = torch.empty(
        layout.outer, layout.length, layout.inner, dtype=torch.bool, device=x.device
    )
    for chunk, _, _, parts in split(job):
        chunk.data(inside).copy_(~saturated(parts, q))
    return layout.restore(inside)
