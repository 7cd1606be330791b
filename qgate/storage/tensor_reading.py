"""Tensors from files at any place: mapped into memory, or read in ranges where there is no path.

Torch files of a store are read whole. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from qgate.archives import load_torch, load_torch_bytes
from qgate.errors import QgateError
from qgate.storage.places import read_range
from qgate.storage.safetensors_heads import Head, NoHeadError, read_head, write_head

if TYPE_CHECKING:
    from qgate.storage.places import Place

_FIRST = 1 << 16


class TensorFile(Protocol):
    """An open safetensors file."""

    def keys(self) -> list[str]:
        """Return its names, in the order in which they are read."""

    def get_tensor(self, name: str) -> Tensor:
        """Read one tensor."""


def read_torch(place: Place) -> Any:
    """Read a torch file weights-only."""
    if isinstance(place, Path):
        return load_torch(place)
    return load_torch_bytes(place.read_bytes(), repr(str(place)))


def read_npy(place: Place) -> np.ndarray[Any, Any]:
    if isinstance(place, Path):
        array: np.ndarray[Any, Any] = np.load(place, mmap_mode="r", allow_pickle=False)
        return array
    with place.open("rb") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def safetensors_head(place: Place) -> Head:
    """Read the head of a safetensors file."""
    try:
        return read_head(partial(read_range, place), _FIRST)
    except NoHeadError:
        raise QgateError(f"{str(place)!r} is damaged or no .safetensors file.") from None


def safetensors_entries(place: Place) -> dict[str, dict[str, Any]]:
    """Read what the head says of each tensor, in the order in which they are read."""
    entries = safetensors_head(place).entries
    if not isinstance(place, Path):
        return entries
    with open_safetensors(place) as file:
        return {name: entries[name] for name in file.keys()}  # noqa: SIM118


@contextlib.contextmanager
def open_safetensors(place: Place) -> Iterator[TensorFile]:
    """Open a safetensors file to read tensor after tensor."""
    if not isinstance(place, Path):
        yield _RangedFile(place)
        return
    from safetensors import safe_open

    with safe_open(place, framework="pt") as file:
        yield file


class _RangedFile:
    def __init__(self, place: Place) -> None:
        self._place, self._head = place, safetensors_head(place)

    def keys(self) -> list[str]:
        return list(self._head.entries)

    def get_tensor(self, name: str) -> Tensor:
        """Read the range of a tensor's bytes.

        It is handed to the library as a file of its own, which checks shape, dtype and length.
        """
        from safetensors.torch import load

        entry = self._head.entries[name]
        first, last = entry["data_offsets"]
        start, data = self._head.start, b""
        if 0 <= first < last:
            data = read_range(self._place, start + first, start + last)
        if first < 0 or len(data) != last - first:
            raise QgateError(
                f"{str(self._place)!r} is cut off: a tensor in it ends beyond its end."
            )
        return load(write_head({"x": {**entry, "data_offsets": [0, last - first]}}) + data)["x"]
