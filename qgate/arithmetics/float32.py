"""Steps of float32 arithmetic that torch has no function for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_BELOW_TF32 = 13


def fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return x y + z of float32 values, rounded once to float32.

    The product is exact in float64. The sum is rounded there to odd, which keeps the second
    rounding right.
    """
    product, addend = x.double() * y.double(), z.double()
    total = product + addend
    beside = total - product
    lost = (product - (total - beside)) + (addend - beside)
    bits = total.view(torch.int64)
    outward = (lost > 0) == (total > 0)
    odd = bits + outward.long().mul(2).sub(1)
    return (
        bits.where((lost.abs() > 0).logical_not() | (bits & 1 == 1), odd).view(total.dtype).float()
    )


def fma_chain(a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """Return the products [..., M, N] of `a` [..., M, K] and `b` [..., N, K], summed in order of K.

    `start` is what the sums begin with, +0 if None.
    """
    x, y = a.float()[..., :, None, :], b.float()[..., None, :, :]
    shape = torch.broadcast_shapes(x.shape[:-1], y.shape[:-1])
    total = torch.zeros(shape, dtype=torch.float32, device=a.device) if start is None else start
    for step in range(a.shape[-1]):
        total = fma(x[..., step], y[..., step], total)
    return total


def to_tf32(x: Tensor) -> Tensor:
    """Round float32 values to the 10 fraction bits of TF32, ties to even."""
    bits = x.float().contiguous().view(torch.int32)
    half = (1 << (_BELOW_TF32 - 1)) - 1
    rounded = (bits + half + ((bits >> _BELOW_TF32) & 1)) & -(1 << _BELOW_TF32)
    return x.float().where(~x.isfinite(), rounded.view(torch.float32))


def added_in_order(parts: Iterable[Tensor]) -> Tensor:
    """Add float32 tensors one after the other, beginning with +0."""
    total: Tensor | None = None
    for part in parts:
        total = part + 0.0 if total is None else total + part
    if total is None:
        raise ValueError("there is nothing to add")
    return total
