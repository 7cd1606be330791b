"""Arithmetic that gives the same bits on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def divided(x: Tensor, by: float | Tensor) -> Tensor:
    """Divide by a number or a tensor; a result of 16 bits is rounded once, from float32.

    CUDA multiplies by the reciprocal of a number, also of one in a tensor of the CPU, which is one
    bit off.
    """
    wide = x.float() if x.dtype.itemsize == 2 else x
    if isinstance(by, float | int):
        by = wide.new_full((), by)
    elif by.device != wide.device and by.dim() == 0 and by.device.type == "cpu":
        by = wide.new_full((), by.item())
    return (wide / by).to(x.dtype)
