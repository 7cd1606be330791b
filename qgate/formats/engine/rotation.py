"""Hadamard rotation of blocks of a tensor with signs, before it is quantized, and back after."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.formats._work import widen
from qgate.formats.engine.dtypes import narrow
from qgate.formats.settings import QuantizerSettings


def rotated(x: Tensor, q: QuantizerSettings) -> Tensor:
    """Return x times signs times the Hadamard matrix, block by block, in float32 or float64."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    result: Tensor = _Rotation.apply(x, q, dtype, False)  # type: ignore[no-untyped-call]
    return result


def rotated_back(y: Tensor, q: QuantizerSettings, dtype: torch.dtype) -> Tensor:
    """Undo `rotated` of a float64 tensor and round once to dtype."""
    result: Tensor = _Rotation.apply(y, q, dtype, True)  # type: ignore[no-untyped-call]
    return result


def without_rotation(q: QuantizerSettings) -> QuantizerSettings:
    """Return the quantizer of rotated numbers, with exact results."""
    plain = copy.copy(q)
    plain.rotation, plain.dtype = None, torch.float64
    return plain


def quantize_rotated(
    x: Tensor, q: QuantizerSettings, quantize: Callable[[Tensor, QuantizerSettings], Tensor]
) -> Tensor:
    """Rotate, quantize, and rotate back."""
    y = quantize(rotated(x, q), without_rotation(q))
    return rotated_back(y, q, q.dtype or x.dtype)


class _Rotation(torch.autograd.Function):
    """A rotation is orthogonal, so its gradient is rotated the other way."""

    @staticmethod
    def forward(x: Tensor, q: QuantizerSettings, dtype: torch.dtype, back: bool) -> Tensor:
        return _turn(x, q, dtype, back)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        x, ctx.q, ctx.result_dtype, ctx.back = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _turn(grads[0], ctx.q, ctx.dtype, not ctx.back), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _turn(tangents[0], ctx.q, ctx.result_dtype, ctx.back)


def _turn(x: Tensor, q: QuantizerSettings, dtype: torch.dtype, back: bool) -> Tensor:
    """Add and subtract halves in float64, in the order of `definition.hadamard`."""
    assert q.rotation is not None
    size, axis = len(q.rotation), q.rotation_axis
    if not x.dim() or x.shape[axis] % size:
        raise QgateError(
            f"a rotation of {size} does not divide axis {axis} of a tensor of shape "
            f"{tuple(x.shape)}."
        )
    moved = widen(x.detach()).movedim(axis, -1)
    t = moved.reshape(-1, size)
    signs = t.new_tensor(q.rotation)
    t = t if back else t * signs
    width = 1
    while width < size:
        low, high = t.reshape(-1, size // (2 * width), 2, width).unbind(2)
        t = torch.stack((low + high, low - high), 2).reshape(-1, size)
        width *= 2
    t = t * (1 / math.sqrt(size))
    t = t * signs if back else t
    return narrow(t.reshape(moved.shape).movedim(-1, axis).contiguous(), dtype)
