"""Layouts of block scales in memory: functions from row and block to an address.

Each layout is for a matrix of scales, [rows, blocks]; further dimensions are matrices one after the
other, each padded by itself. Addresses count scales, not bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Address = Callable[[Any, Any, int, int], Any]


@dataclass(frozen=True)
class ScaleLayout:
    """A layout of scales as data.

    name     words for messages, after "stored"
    tile     rows and blocks of a matrix are padded to multiples of these
    address  function from row, block, padded rows and padded blocks to the place in memory
    """

    name: str
    tile: tuple[int, int]
    address: Address

    def padded(self, rows: int, blocks: int) -> tuple[int, int]:
        """Return the rows and blocks that memory is kept for."""
        return -(-rows // self.tile[0]) * self.tile[0], -(-blocks // self.tile[1]) * self.tile[1]

    def addresses(self, rows: int, blocks: int) -> Any:
        """Return the place in memory of each scale of a matrix."""
        row, block = np.indices((rows, blocks))
        return self.address(row, block, *self.padded(rows, blocks))

    def store(self, scales: Tensor) -> Tensor:
        """Return [..., rows, blocks] as memory, [..., places], with zeros for padding."""
        rows, blocks = scales.shape[-2:]
        memory = scales.new_zeros(*scales.shape[:-2], math.prod(self.padded(rows, blocks)))
        places = torch.from_numpy(self.addresses(rows, blocks).reshape(-1)).to(scales.device)
        memory[..., places] = scales.flatten(-2)
        return memory

    def load(self, memory: Tensor, rows: int, blocks: int) -> Tensor:
        """Return memory, [..., places], as [..., rows, blocks]."""
        places = torch.from_numpy(self.addresses(rows, blocks)).to(memory.device)
        return memory[..., places]


def _tile_of_128x4(row: Any, block: Any, _rows: int, blocks: int) -> Any:
    tile = row // 128 * (blocks // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def _tile_of_8x4(row: Any, block: Any, _rows: int, blocks: int) -> Any:
    return (row // 8 * (blocks // 4) + block // 4) * 32 + row % 8 * 4 + block % 4


def _four_rows(row: Any, block: Any, _rows: int, blocks: int) -> Any:
    share = blocks // 4
    return (row // 4 * 4 + block // share) * blocks + block % share * 4 + row % 4


BY_ROW = ScaleLayout("row by row", (1, 1), lambda row, block, _rows, blocks: row * blocks + block)
BY_COLUMN = ScaleLayout("in padded columns", (4, 1), lambda row, block, rows, _: block * rows + row)
"""DeepGEMM's float32 scales: columns of 16 bytes or a multiple, as its copies (TMA) want them."""
PACKED_BY_COLUMN = ScaleLayout(
    "in columns of four blocks",
    (4, 4),
    lambda row, block, rows, _: (block // 4 * rows + row) * 4 + block % 4,
)
"""DeepGEMM's UE8M0 scales: the exponents of four blocks in an int32, and these by columns."""
TILES_OF_128X4 = ScaleLayout("in tiles of 128x4", (128, 4), _tile_of_128x4)
"""What tensor cores of Blackwell read: cuBLAS, CUTLASS, cuDNN; 32 rows, 4 of 32 rows, 4 blocks."""
TILES_OF_8X4 = ScaleLayout("in tiles of 8x4", (8, 4), _tile_of_8x4)
"""The layout of TensorRT-LLM's and FlashInfer's kernels for few rows."""
FOUR_ROWS = ScaleLayout("in groups of four rows", (4, 4), _four_rows)
"""The scales of V in an NVFP4 cache, interleaved over four tokens."""
SWIZZLES = (TILES_OF_128X4, FOUR_ROWS, TILES_OF_8X4, PACKED_BY_COLUMN, BY_COLUMN)
"""Layouts that differ from rows of scales one after the other."""
