"""A shard that is not on this machine: its head is read once, and of each tensor its own bytes."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from qgate.dumps.shards import ALIGNED, CODES, HEADER
from qgate.storage.folders import Folder
from qgate.storage.safetensors_heads import read_head

_AHEAD = 4 << 20
_DTYPES = {code: getattr(torch, name) for name, code in CODES.items()}


class RangedShard:
    """Like `safe_open` of a file, of which it has the methods that are needed.

    Who reads tensor after tensor, as one who proves them all, gets several with one request.
    """

    def __init__(self, home: Folder, name: str) -> None:
        self._home, self._name = home, name
        head = read_head(partial(home.read, name), HEADER)
        self._start, self._metadata, self._entries = head.start, head.metadata, head.entries
        self._size = max((entry["data_offsets"][1] for entry in self._entries.values()), default=0)
        self._last, self._kept = -1, (0, b"")

    def keys(self) -> list[str]:
        return list(self._entries)

    def metadata(self) -> dict[str, str]:
        return self._metadata

    def get_tensor(self, key: str) -> Tensor:
        dtype, shape = self._told(key)
        return self._values(key, dtype, math.prod(shape)).reshape(shape)

    def beginning(self, key: str, nbytes: int) -> Tensor:
        """The first bytes of a tensor."""
        dtype, shape = self._told(key)
        most = math.prod(shape) * dtype.itemsize
        return self._values(key, dtype, min(nbytes, most) // dtype.itemsize)

    def _told(self, key: str) -> tuple[torch.dtype, list[int]]:
        if key not in self._entries:
            raise ValueError(f"it has no tensor {key!r}")
        entry = self._entries[key]
        dtype, shape = _DTYPES[entry["dtype"]], list(entry["shape"])
        first, last = entry["data_offsets"]
        if last - first != math.prod(shape) * dtype.itemsize or first < 0:
            raise ValueError("its head does not fit together")
        return dtype, shape

    def _values(self, key: str, dtype: torch.dtype, elements: int) -> Tensor:
        if not elements:
            return torch.empty(0, dtype=dtype)
        first = self._entries[key]["data_offsets"][0]
        size = elements * dtype.itemsize
        data = self._read(first, first + size)
        if len(data) != size:
            raise ValueError("it is cut off")
        return torch.frombuffer(bytearray(data), dtype=dtype)

    def _read(self, first: int, last: int) -> bytes:
        """These bytes, and more only where these follow the ones before; between tensors there are
        some to fill up."""
        begun, kept = self._kept
        if not begun <= first <= last <= begun + len(kept):
            follows = 0 <= first - self._last < ALIGNED
            until = min(self._size, max(last, first + _AHEAD)) if follows else last
            begun = first
            kept = self._home.read(self._name, self._start + first, self._start + until)
            self._kept = (begun, kept) if follows else (0, b"")
        self._last = last
        return kept[first - begun : last - begun]
