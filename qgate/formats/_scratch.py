"""What the engine keeps between calls: buffers for chunks, and tables worth making once.

A fresh buffer per operation costs page faults, which take longer than the operation. What is kept
is an ordinary tensor, whatever mode it was first asked for in: made in `torch.inference_mode` it
could not be written to outside, and made while torch traces it would not be a tensor at all.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LARGEST_KEPT = 2**21
_held = threading.local()

T = TypeVar("T")


def tracing() -> bool:
    """If tensors made now may be fakes that a tracer or a functional transform put there."""
    import torch

    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


def buffer(slot: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized tensor that is valid until the next call with this slot in this thread."""
    import torch

    size = math.prod(shape)
    if device.type != "cpu" or size > _LARGEST_KEPT or tracing():
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    buffers: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]]
    buffers = _held.__dict__.setdefault("buffers", {})
    kept, shaped = buffers.get((slot, dtype), (None, None))
    if shaped is not None and shaped.shape == shape:
        return shaped
    with torch.inference_mode(False):
        if kept is None or kept.numel() < size:
            kept = torch.empty(size, dtype=dtype, device="cpu")
        shaped = kept[:size].view(tuple(shape))
    buffers[slot, dtype] = kept, shaped
    return shaped


def whole(number: int, dtype: torch.dtype | None = None) -> Tensor:
    """A number as a tensor of int32 or `dtype`, which spares its conversion in each operation.

    An int32 number that does not fit wraps around, as sums with it do.
    """
    import torch

    if dtype is None:
        dtype, number = torch.int32, (number + 2**31) % 2**32 - 2**31
    return torch.tensor(number, dtype=dtype, device="cpu")


class Shelf:
    """A few values by key, the oldest dropped for a new one."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._values: dict[Hashable, object] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of that key, made now if it is not there."""
        if tracing():
            return make()
        import torch

        found = self._values.get(key)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = make()
            while len(self._values) >= self.room:
                self._values.pop(next(iter(self._values)), None)
            self._values[key] = found
        return found  # type: ignore[return-value]
