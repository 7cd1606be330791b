"""A value for other processes that each of them unpacks once, whatever engine started it."""

from __future__ import annotations

import copyreg
import io
import uuid
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, TypeVar, cast

import numpy as np

T = TypeVar("T")
# The last one that this process unpacked: an engine may hand the same one over with every item.
_unpacked: dict[str, Any] = {}


class Sent(Generic[T]):
    """Packed where it is made; what cannot be packed is the error of its pickling."""

    def __init__(self, value: T) -> None:
        self.key = uuid.uuid4().hex
        self._data = np.frombuffer(_packed(value), dtype=np.uint8)

    def value(self) -> T:
        """The same object for everything that one process does."""
        if self.key not in _unpacked:
            _unpacked.clear()
            _unpacked[self.key] = ForkingPickler.loads(self._data.data)
        return cast(T, _unpacked[self.key])


def _packed(value: object) -> bytes:
    """With all that belongs to it: torch tells other processes where a tensor's memory is, which
    only the first of them can ask for."""
    buffer = io.BytesIO()
    pickler: Any = ForkingPickler(buffer)
    pickler.dispatch_table = copyreg.dispatch_table
    pickler.dump(value)
    return buffer.getvalue()
