"""Tensors from files that are no local ones, read in ranges where the format allows it.

Of a safetensors file the head is read, and then one tensor at a time; torch files are read whole.
Nothing is unpickled.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from qgate.errors import QgateError

if TYPE_CHECKING:
    from upath import UPath

    from qgate.urls import Place

_LONGEST_HEAD = 100 << 20
Head = dict[str, dict[str, Any]]


def read_torch_at(place: UPath) -> Any:
    """What a torch file holds, read weights-only."""
    return torch.load(io.BytesIO(place.read_bytes()), map_location="cpu", weights_only=True)


def safetensors_head(place: Place) -> tuple[Head, int]:
    """The entries of a safetensors file, and where its data begins."""
    with place.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _LONGEST_HEAD:
            raise QgateError(f"{str(place)!r} is damaged or no .safetensors file.")
        head = json.loads(file.read(length))
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
    if not 0 <= first <= last <= place.stat().st_size - start:
        raise QgateError(f"{str(place)!r} is cut off: a tensor in it ends beyond its end.")
    with place.open("rb") as file:
        file.seek(start + first)
        data = file.read(last - first)
    told = {"x": {**entry, "data_offsets": [0, last - first]}}
    head = json.dumps(told).encode()
    return load(len(head).to_bytes(8, "little") + head + data)["x"]


def read_npy_at(place: UPath) -> np.ndarray[Any, Any]:
    with place.open("rb") as file:
        return np.lib.format.read_array(file, allow_pickle=False)
