"""A value for other processes, which each of them unpacks once."""

from __future__ import annotations

import copyreg
import io
import uuid
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, TypeVar, cast

import numpy as np

T = TypeVar("T")
# The last value that this process unpacked: an engine may pass the same one with every item.
_UNPACKED: dict[str, object] = {}


class PackedValue(Generic[T]):
    """A pickled value; one that cannot be pickled raises its error here."""

    def __init__(self, value: T) -> None:
        self.key = uuid.uuid4().hex
        self._data = np.frombuffer(_pack(value), dtype=np.uint8)

    def value(self) -> T:
        """Return the value, the same object for all items of a process."""
        if self.key not in _UNPACKED:
            _UNPACKED.clear()
            _UNPACKED[self.key] = ForkingPickler.loads(self._data.data)
        return cast(T, _UNPACKED[self.key])


def _pack(value: object) -> bytes:
    """Pickle a value with its data, where torch would send a handle that one process can open."""
    buffer = io.BytesIO()
    pickler: Any = ForkingPickler(buffer)
    pickler.dispatch_table = copyreg.dispatch_table
    pickler.dump(value)
    return buffer.getvalue()
