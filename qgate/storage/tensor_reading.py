"""Tensors from files at any location: mapped into memory, or read in ranges from a store.

Torch files of a store are read whole. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from qgate.errors import QgateError
from qgate.storage.archives import load_torch
from qgate.storage.foreign import MOST_TENSORS, foreign_path, open_foreign, read_foreign, read_range
from qgate.storage.safetensors_heads import Head, NoHeadError, TensorHead, read_head, write_head

if TYPE_CHECKING:
    from qgate.storage.folders import Folder
    from qgate.storage.locations import Location

_TENSORS = "tensors"
_FIRST = 1 << 16
_AHEAD = 4 << 20
_ALIGNED = 8
_NOTHING = torch.empty(0, dtype=torch.uint8)


class TensorFile(Protocol):
    """An open safetensors file."""

    def keys(self) -> list[str]:
        """Return the names of its tensors, in reading order."""

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the head."""

    def get_tensor(self, name: str) -> Tensor:
        """Read one tensor."""


def read_torch(source: Location | bytes, label: str = "") -> Any:
    """Load a torch file, or the bytes of one, weights-only."""
    if isinstance(source, Path):
        return load_torch(source)
    data = source if isinstance(source, bytes) else read_foreign(source, _TENSORS, MOST_TENSORS)
    return load_torch(data, label or repr(str(source)))


def torch_source(folder: Folder, name: str) -> Path | bytes:
    """Return a source for `read_torch`: a path on this machine, or the bytes of an object."""
    return folder.read(name) if folder.path is None else folder.path / name


def read_npy(location: Location) -> np.ndarray[Any, Any]:
    if isinstance(location, Path):
        path = foreign_path(location, _TENSORS)
        array: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        return array
    with open_foreign(location, _TENSORS, None) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def safetensors_head(location: Location) -> Head:
    """Read the head of a safetensors file."""
    try:
        return read_head(partial(read_range, location), _FIRST)
    except QgateError as error:
        raise QgateError(f"{str(location)!r}: {error}") from None
    except NoHeadError:
        raise QgateError(f"{str(location)!r} is damaged or no .safetensors file.") from None


def safetensors_entries(location: Location) -> Mapping[str, TensorHead]:
    """Read the head's entry of each tensor, in reading order."""
    entries = safetensors_head(location).entries
    if not isinstance(location, Path):
        return entries
    with open_safetensors(location) as file:
        return {name: entries[name] for name in file.keys()}  # noqa: SIM118


@contextlib.contextmanager
def open_safetensors(location: Location, head: Head | None = None) -> Iterator[TensorFile]:
    """Open a safetensors file, whose head may have been read, to read tensor after tensor."""
    if not isinstance(location, Path):
        yield RangedTensors(partial(read_range, location), head or safetensors_head(location))
        return
    with safe_open(foreign_path(location, _TENSORS), framework="pt") as file:
        yield file


def open_tensors(folder: Folder, name: str, first: int) -> TensorFile:
    """Open a safetensors file of a folder.

    first   bytes to read at first from a store, which usually hold the head
    """
    if folder.path is not None:
        return safe_open(foreign_path(folder.path / name, _TENSORS), framework="pt")
    read = partial(folder.read, name)
    return RangedTensors(read, read_head(read, first))


class RangedTensors:
    """A safetensors file that is read in ranges, by `read(start, stop)`.

    Tensors that are read one after the other come several per request.
    """

    def __init__(self, read: Callable[[int, int], bytes], head: Head) -> None:
        self._read, self.head = read, head
        self._size = max((entry["data_offsets"][1] for entry in head.entries.values()), default=0)
        self._last, self._ahead = -1, (0, b"")

    def keys(self) -> list[str]:
        return list(self.head.entries)

    def metadata(self) -> dict[str, str]:
        return self.head.metadata

    def get_tensor(self, name: str) -> Tensor:
        """Read a tensor as a file of its own, whose shape, dtype and length the library checks."""
        first, last = self._offsets(name)
        entry = {**self.head.entries[name], "data_offsets": [0, last - first]}
        return load(write_head({"x": entry}) + self._data(first, last))["x"]

    def first_bytes(self, name: str, size: int) -> Tensor:
        first, last = self._offsets(name)
        data = self._data(first, min(last, first + size))
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NOTHING

    def _offsets(self, name: str) -> tuple[int, int]:
        if name not in self.head.entries:
            raise ValueError(f"it has no tensor {name!r}")
        first, last = self.head.entries[name]["data_offsets"]
        if not 0 <= first <= last:
            raise ValueError("its head does not fit together")
        return first, last

    def _data(self, first: int, last: int) -> bytes:
        """Read these bytes, and ahead only where they follow the last ones, up to alignment."""
        start, cached = self._ahead
        if not start <= first <= last <= start + len(cached):
            follows = 0 <= first - self._last < _ALIGNED
            stop = min(self._size, max(last, first + _AHEAD)) if follows else last
            start, cached = first, b""
            if last > first:
                cached = self._read(self.head.start + first, self.head.start + stop)
            self._ahead = (start, cached) if follows else (0, b"")
        self._last = last
        data = cached[first - start : last - start]
        if len(data) != last - first:
            raise ValueError("it is cut off: a tensor in it ends beyond its end")
        return data
