"""Memory for chunks that is used again: fresh memory costs more than the work on it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

SHAPES = 8
"""Shapes of chunks whose views are kept."""
LARGE = 31 << 20
"""Bytes of a block after which glibc keeps smaller ones that are freed; none is written to."""
Array = np.ndarray[Any, Any]
Shape = tuple[int, int]
_local = threading.local()


class Workspace:
    """Matrices of one chunk, the same as tiles [down, height, across, width], and as arrays.

    Tiles have zeros where a chunk ends before them. `zeros` and `mask` are of the chunk alone;
    `mask_tiles` is the mask as tiles, None where these do not fit the chunk.
    """

    def __init__(self, shape: Shape, tile: Shape, memory: Callable[..., Tensor]) -> None:
        (rows, columns), (height, width) = shape, tile
        tiled = -(-rows // height), height, -(-columns // width), width
        self.shape = shape
        self.value_tiles, self.parent_tiles = memory("values", tiled), memory("parent", tiled)
        self.values, self.parent = self.cut(self.value_tiles), self.cut(self.parent_tiles)
        self.ratios, self.rounded = memory("ratios", tiled), memory("rounded", tiled)
        self.bits = memory("bits", tiled, torch.int32)
        self.halves = self.bits.view(-1).view(torch.int16)[: rows * columns].view(shape)
        self.values_array: Array = self.values.numpy()
        self.rounded_array: Array = self.cut(self.rounded).numpy()
        self.zeros: Array = memory("zeros", shape, torch.bool).numpy()
        self.mask: Array = memory("mask", shape, torch.bool).numpy()
        is_whole = tiled[0] * height == rows and tiled[2] * width == columns
        self.mask_tiles: Array | None = self.mask.reshape(tiled) if is_whole else None

    def cut(self, tiles: Tensor) -> Tensor:
        """View tiles as the chunk, without what was added to fit."""
        down, height, across, width = tiles.shape
        rows, columns = self.shape
        return tiles.view(down * height, across * width)[:rows, :columns]


class ChunkMemory:
    """Memory of one thread for the chunks of weights, in one workspace at a time."""

    def __init__(self) -> None:
        # glibc returns what is freed to the system, unless it has seen larger blocks freed.
        torch.empty(LARGE, dtype=torch.uint8)
        self._flat: dict[str, Tensor] = {}
        self._workspaces: dict[tuple[Shape, Shape], Workspace] = {}

    def workspace(self, shape: Shape, tile: Shape) -> Workspace:
        """Return the memory for a chunk of a shape; what was in it before is lost."""
        rows, columns = shape
        height, width = min(tile[0], rows), min(tile[1], columns)
        key = shape, (height, width)
        work = self._workspaces.get(key)
        if work is None:
            while len(self._workspaces) >= SHAPES:
                self._workspaces.pop(next(iter(self._workspaces)))
            work = self._workspaces[key] = Workspace(*key, self._memory)
        if shape != (work.value_tiles.shape[0] * height, work.value_tiles.shape[2] * width):
            work.value_tiles.zero_()
            work.parent_tiles.zero_()
        return work

    def _memory(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            # Views of what was too small would keep it.
            self._workspaces.clear()
            flat = self._flat[name] = torch.empty(size, dtype=dtype)
        return flat[:size].view(shape)


def thread_memory() -> ChunkMemory:
    """Return the memory of this thread."""
    memory: ChunkMemory | None = getattr(_local, "memory", None)
    if memory is None:
        memory = _local.memory = ChunkMemory()
    return memory
