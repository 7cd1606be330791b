"""Integer tensors among arguments, and the dimensions that their values may be positions in.

A dimension that integers index must keep its length: class labels, ids of an embedding, page
tables, offsets. Which one it is shows the reference on the CPU, where a position out of range is an
exception. On a GPU it is an assertion that ends the device for this process.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qgate.expected.narrow_floats import widened

Function = Callable[..., Any]
INDEX_DTYPES = (torch.int16, torch.int32, torch.int64)
"""Dtypes of positions; 8-bit integers are codes of packed values."""
FEW_ELEMENTS = 2**20
"""Elements of all arguments up to which a reference is tried on the CPU in any case."""


def is_index(value: Any) -> bool:
    """Return True for an argument that may hold positions: integers, negative ones apart."""
    if not isinstance(value, Tensor) or value.dtype not in INDEX_DTYPES or not value.numel():
        return False
    # A label to ignore is one negative number, such as -100; codes have several.
    return len(value[value < 0].unique()) < 2


def on_host(like: Function, arguments: Sequence[Any]) -> tuple[Function, list[Any]] | None:
    """Return a reference with copies of its arguments in the memory of the CPU.

    8-bit floats become float64, as references take them. None for a reference that keeps tensors of
    a device for itself where no argument holds positions: it is tried on its device.
    """
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    wide = [widened(value) for value in arguments]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return like, wide
    indexed = any(is_index(value) for value in arguments)
    if not indexed and sum(tensor.numel() for tensor in tensors) > FEW_ELEMENTS:
        return like, wide
    moved = [value.cpu() if isinstance(value, Tensor) else value for value in wide]
    of_host = like
    if isinstance(like, nn.Module):
        with contextlib.suppress(Exception):  # of a module that cannot be copied
            of_host = copy.deepcopy(like).cpu()
    if accepts(of_host, moved):
        return of_host, moved
    return None if indexed else (like, wide)


def accepts(like: Function, arguments: Sequence[Any]) -> bool:
    """Tell if a reference takes arguments, which it may change."""
    copies = [value.clone() if isinstance(value, Tensor) else value for value in arguments]
    try:
        like(*copies)
    except Exception:
        return False
    return True


def bound_of(like: Function, arguments: Sequence[Any], position: int) -> int | None:
    """Return the length of the dimension that an integer argument indexes.

    0 if it indexes none of the arguments; None if the reference does not tell, because it takes any
    number there, or none but these.
    """
    integers = arguments[position]
    largest, most = int(integers.max()), torch.iinfo(integers.dtype).max
    lengths = sorted(
        {
            length
            for value in arguments
            if isinstance(value, Tensor)
            for length in value.shape
            if largest < length <= most
        }
    )

    def takes(value: int) -> bool:
        return accepts(like, with_position(arguments, position, value))

    if not takes(max(largest - 1, 0)):
        return None
    for length in lengths:
        if not takes(length - 1):
            return 0
        if not takes(length):
            return length
    return None if takes(min(most, 4 * max(lengths, default=2**13))) else 0


def with_position(arguments: Sequence[Any], position: int, value: int) -> list[Any]:
    """Return arguments with another number as the first one of an integer tensor."""
    changed = list(arguments)
    integers = arguments[position].clone(memory_format=torch.contiguous_format)
    integers.view(-1)[0] = value
    changed[position] = integers
    return changed
