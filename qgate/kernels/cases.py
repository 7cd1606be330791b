"""Tensors that reveal a wrong kernel: all patterns, ties, the ends of the range, NaN and Inf."""

from __future__ import annotations

import torch
from torch import Tensor


def patterns(dtype: torch.dtype) -> Tensor:
    """Return all patterns of 16 bits; of 32 bits those at and beside the numbers of 16."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu")
    if dtype.itemsize == 2:
        return every.to(torch.int16).view(dtype)
    low = torch.tensor([0, 1, 0x7FFF, -0x8000, -0x7FFF, -1], dtype=torch.int32, device="cpu")
    fine = (every[::7, None] << 16) + low[:, None].T
    return fine.reshape(-1).view(torch.float32)


def numbers(dtype: torch.dtype) -> Tensor:
    """Return the patterns by size, so that neighbors share an exponent, by bits, and shuffled."""
    every = patterns(dtype)
    finite = every[every.isfinite()]
    by_size = finite[finite.abs().sort(stable=True).indices]
    mixing = torch.Generator("cpu").manual_seed(0)
    mixed = finite[torch.randperm(len(finite), generator=mixing, device="cpu")]
    return torch.cat([by_size, every, mixed])


def arrange(x: Tensor, block: int, kind: tuple[bool, bool]) -> Tensor:
    """Arrange numbers as [outer, length, inner]; `kind` is (upright, with a short last block)."""
    upright, short = kind
    length = block * 3 + (max(block // 3, 1) if short and block > 1 else 0)
    inner = 600 if upright else 1
    outer = max(-(-len(x) // (length * inner)), 1)
    room = outer * length * inner
    filled = x.repeat(-(-room // len(x)))[:room]
    if not upright:
        return filled.view(outer, length, 1)
    # Neighbors along the middle stay neighbors.
    return filled.view(outer, inner, length).transpose(1, 2).contiguous()


def bell_curve(dtype: torch.dtype, exponent: int = 0, count: int = 2**13) -> Tensor:
    """Draw a bell curve with outliers, in units of 2**exponent."""
    generator = torch.Generator("cpu").manual_seed(1)
    x = torch.randn(count, generator=generator, device="cpu")
    x[::97] *= 50
    return (x.double() * 2.0**exponent).to(dtype)


def move(x: Tensor, device: torch.device, before: int) -> Tensor:
    """Copy x to a device, after so many other numbers: it may begin at an odd address."""
    return torch.cat([x.new_zeros(before), x]).to(device)[before:]
