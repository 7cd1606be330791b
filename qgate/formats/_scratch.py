"""Memory that the engine reuses between calls: buffers for chunks, and tables.

A fresh buffer per operation costs page faults, which take longer than the operation. The reused
tensors are ordinary ones in every mode of torch: a tensor made in `torch.inference_mode` cannot be
written to outside of it, and while torch traces it would not be a tensor at all.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LARGEST = 2**21
_local = threading.local()

T = TypeVar("T")


def tracing() -> bool:
    """Tell whether new tensors may be fakes of a tracer or of a functional transform."""
    import torch

    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


def buffer(slot: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor, valid until this thread asks for the same slot again."""
    import torch

    size = math.prod(shape)
    if device.type != "cpu" or size > _LARGEST or tracing():
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    buffers: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]]
    buffers = _local.__dict__.setdefault("buffers", {})
    flat, shaped = buffers.get((slot, dtype), (None, None))
    if shaped is not None and shaped.shape == shape:
        return shaped
    with torch.inference_mode(False):
        if flat is None or flat.numel() < size:
            flat = torch.empty(size, dtype=dtype, device="cpu")
        shaped = flat[:size].view(tuple(shape))
    buffers[slot, dtype] = flat, shaped
    return shaped


def whole(number: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return a number as a tensor of int32 or `dtype`, which no operation has to convert.

    An int32 number that does not fit wraps around, as sums with it do.
    """
    import torch

    if dtype is None:
        dtype, number = torch.int32, (number + 2**31) % 2**32 - 2**31
    return torch.tensor(number, dtype=dtype, device="cpu")


class BoundedCache:
    """A few values by key; a new one takes the place of the oldest."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: dict[Hashable, object] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key, and make it first where it is missing."""
        if tracing():
            return make()
        import torch

        value = self._values.get(key)
        if value is None:
            with torch.inference_mode(False), torch.no_grad():
                value = make()
            while len(self._values) >= self.size:
                self._values.pop(next(iter(self._values)), None)
            self._values[key] = value
        return value  # type: ignore[return-value]
