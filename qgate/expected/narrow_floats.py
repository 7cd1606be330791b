"""Tensors whose dtype torch computes little with: copies, cuts and comparisons by their bits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from qgate.tensor_inputs import FLOATS

NARROW = frozenset(dtype for dtype in FLOATS if dtype.itemsize == 1)
"""Floating-point dtypes of one byte: their values are codes, fixed by whoever made them."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_narrow(value: Any) -> bool:
    """Return True for a tensor of 8-bit floats."""
    return isinstance(value, Tensor) and value.dtype in NARROW


def is_wide_float(value: Any) -> bool:
    """Return True for a floating-point tensor whose values may be changed and rounded."""
    return isinstance(value, Tensor) and value.is_floating_point() and not is_narrow(value)


def widened(value: Any) -> Any:
    """Return 8-bit floats as float64, which has all their values, and anything else as it is."""
    return value.double() if is_narrow(value) else value


def in_float64(value: Any) -> Any:
    """Return a floating-point tensor in float64, and anything else as it is."""
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def are_finite(values: Tensor) -> bool:
    """Tell if all values are finite; a sum tells it faster, but for one that overflows."""
    if values.is_floating_point() and math.isfinite(float(values.sum())):
        return True
    return bool(values.isfinite().all())


def bits_of(x: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, in the same memory."""
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.view(_INTEGERS[x.dtype.itemsize])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Tell if two tensors of one dtype hold the same bits, NaN included."""
    if left.shape != right.shape:
        return False
    try:
        return torch.equal(bits_of(left), bits_of(right))
    except (RuntimeError, TypeError, KeyError):  # of tensors of other code, which have no bits
        return torch.equal(left.nan_to_num(), right.nan_to_num())


def without_subclass(x: Tensor) -> Tensor:
    """Return a tensor whose operators are torch's; one that wraps other tensors as it is."""
    if type(x) is Tensor or is_traceable_wrapper_subclass(x):
        return x
    try:
        return x.as_subclass(Tensor)
    except RuntimeError:  # of a subclass that refuses it
        return x


def take_entries(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return entries of one dimension, in contiguous memory."""
    index = index.to(x.device)
    if is_narrow(x):
        return bits_of(x).index_select(dim, index).view(x.dtype)
    return x.index_select(dim, index)


def shares_memory(result: Any, argument: Tensor) -> bool:
    """Tell if a result is an argument, or lies in its memory."""
    parts = result if isinstance(result, tuple | list) else [result]
    for part in parts:
        if part is argument:
            return True
        with contextlib.suppress(RuntimeError, NotImplementedError):  # of tensors without storage
            if isinstance(part, Tensor) and part.device == argument.device:
                places = [t.untyped_storage().data_ptr() for t in (part, argument)]
                if places[0] == places[1] != 0:
                    return True
    return False


def size_of(arguments: Sequence[Any]) -> int:
    """Return the number of values among arguments."""
    return sum(value.numel() for value in arguments if isinstance(value, Tensor))
