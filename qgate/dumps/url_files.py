"""Tensors from files that are no local ones, read in ranges where the format allows it.

Of a safetensors file the head is read, and then one tensor at a time; torch files are read whole.
Nothing is unpickled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from qgate.archives import load_torch_bytes
from qgate.errors import QgateError

if TYPE_CHECKING:
    from upath import UPath

    from qgate.storage.places import Place

_FIRST, _LONGEST_HEAD = 1 << 16, 100 << 20
# Servers that may answer with the whole file.
_STREAMS = ("http", "https")
Head = dict[str, dict[str, Any]]


def read_torch_at(place: UPath) -> Any:
    """What a torch file holds, read weights-only."""
    return load_torch_bytes(place.read_bytes(), repr(str(place)))


def safetensors_head(place: Place) -> tuple[Head, int]:
    """The entries of a safetensors file, and where its data begins."""
    data = _range(place, 0, _FIRST)
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= _LONGEST_HEAD:
        raise QgateError(f"{str(place)!r} is damaged or no .safetensors file.")
    if len(data) < 8 + length:
        data += _range(place, len(data), 8 + length)
    head = json.loads(data[8 : 8 + length])
    if not isinstance(head, dict):
        raise QgateError(f"{str(place)!r} is damaged or no .safetensors file.")
    head.pop("__metadata__", None)
    return head, 8 + length


def safetensors_entry(place: UPath, entry: dict[str, Any], start: int) -> Tensor:
    """One tensor, by the range of its bytes.

    It is handed to the library as a file of its own, which checks shape, dtype and length.
    """
    from safetensors.torch import load

    first, last = entry["data_offsets"]
    data = _range(place, start + first, start + last) if 0 <= first < last else b""
    if first < 0 or len(data) != last - first:
        raise QgateError(f"{str(place)!r} is cut off: a tensor in it ends beyond its end.")
    told = {"x": {**entry, "data_offsets": [0, last - first]}}
    head = json.dumps(told).encode()
    return load(len(head).to_bytes(8, "little") + head + data)["x"]


def _range(place: Place, start: int, stop: int) -> bytes:
    """These bytes and no more, or less at the end: a file that is opened would read ahead."""
    if isinstance(place, Path) or place.protocol in _STREAMS:
        with place.open("rb") as file:
            file.seek(start)
            return bytes(file.read(stop - start))
    return bytes(place.fs.cat_file(place.path, start=start, end=stop))


def read_npy_at(place: UPath) -> np.ndarray[Any, Any]:
    with place.open("rb") as file:
        return np.lib.format.read_array(file, allow_pickle=False)
