"""Buffers that the fast kernels use again for every chunk.

A fresh buffer per operation costs page faults, which take longer than the operation. Buffers belong
to a thread and stay small: one chunk each.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_held = threading.local()


def buffer(slot: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized tensor that is valid until the next call with this slot in this thread."""
    size = math.prod(shape)
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    buffers: dict[tuple[str, torch.dtype], Tensor] = _held.__dict__.setdefault("buffers", {})
    key = (slot, dtype)
    if key not in buffers or buffers[key].numel() < size:
        buffers[key] = torch.empty(size, dtype=dtype)
    return buffers[key][:size].view(tuple(shape))
