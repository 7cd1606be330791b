"""Starting a program on the device of a tensor, on its bits."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from torch import Tensor

from qgate.kernels.shapes import TILE


def bits(x: Tensor) -> Tensor:
    """The numbers as integers of their width, which is how programs load them."""
    if x.dtype.itemsize == 1:
        return x.view(torch.uint8)
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def flat_bits(x: Tensor) -> Tensor:
    """Of all numbers in a row; `reshape` alone leaves the gaps of a view like `x[::2]`, and a
    negative view has the signs of another."""
    return bits(x.reshape(-1).contiguous().resolve_neg())


def launch(
    program: Any, programs: int, x: Tensor, *arguments: Any, warps: int = 4, **constants: Any
) -> None:
    """Fusing a product with a sum is off: it rounds once where the definition rounds twice."""
    for each in (x, *arguments):
        if isinstance(each, torch.Tensor) and not each.is_contiguous():
            raise ValueError("a program got a tensor with gaps: it would read what is in them.")
    there = torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
    with there:
        program[(programs,)](x, *arguments, **constants, num_warps=warps, enable_fp_fusion=False)


def interpreted() -> bool:
    """If triton was told to run programs in numpy, on tensors of the CPU."""
    try:
        knobs = importlib.import_module("triton.knobs")
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


def tile() -> int:
    """Elements per program: what registers hold; the interpreter is faster with more."""
    return 2**16 if interpreted() else TILE
