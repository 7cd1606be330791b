"""Start a program on the device of a tensor, on its bits."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from torch import Tensor

from qgate.kernels.shapes import TILE


def bits(x: Tensor) -> Tensor:
    """View numbers as integers of their width, as programs load them."""
    if x.dtype.itemsize == 1:
        return x.view(torch.uint8)
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def flat_bits(x: Tensor) -> Tensor:
    """Return `bits` of all numbers in a row.

    `reshape` alone leaves the gaps of a view like `x[::2]`, and a negative view has the signs of
    another tensor.
    """
    return bits(x.reshape(-1).contiguous().resolve_neg())


def launch(
    program: Any, programs: int, x: Tensor, *arguments: Any, warps: int = 4, **constants: Any
) -> None:
    """Start a program without fused multiply-add, which rounds once where torch rounds twice."""
    for argument in (x, *arguments):
        if isinstance(argument, torch.Tensor) and not argument.is_contiguous():
            raise ValueError("a program got a tensor with gaps: it would read what is in them.")
    device = torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
    with device:
        program[(programs,)](x, *arguments, **constants, num_warps=warps, enable_fp_fusion=False)


def to_host(x: Tensor) -> Tensor:
    """Copy a tensor to the host, by pinned memory from CUDA: it is not copied twice there."""
    if not x.is_cuda:
        return x.cpu()
    room = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    room.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return room


def interpreted() -> bool:
    """Tell whether triton runs programs in numpy, on tensors of the CPU."""
    try:
        knobs = importlib.import_module("triton.knobs")
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


def tile() -> int:
    """Return the elements per program: what registers hold; the interpreter is faster with more."""
    return 2**16 if interpreted() else TILE
