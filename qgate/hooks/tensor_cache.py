"""A cache by tensor, so that a tensor that several modules receive is read once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class TensorCache(Generic[T]):
    """Values made of tensors, each valid while its tensor is alive and not written to."""

    def __init__(self, size: int | None = None) -> None:
        self._size = size
        self._entries: dict[int, tuple[weakref.ref[Tensor], int, T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tensor: Tensor, make: Callable[[Tensor], T]) -> tuple[T, bool]:
        """Return the value of a tensor, and whether it had to be made."""
        if tensor.is_inference():  # without a version a write cannot be detected
            return make(tensor), True
        reference, version, value = self._entries.get(id(tensor), (None, -1, None))
        if reference is not None and reference() is tensor and version == tensor._version:
            return value, False  # type: ignore[return-value]
        value = make(tensor)
        self._entries[id(tensor)] = (weakref.ref(tensor), tensor._version, value)
        if self._size is not None:
            alive = [item for item in self._entries.items() if item[1][0]() is not None]
            self._entries = dict(alive[-self._size :])
        return value, True

    def clear(self) -> None:
        self._entries.clear()
