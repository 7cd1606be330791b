"""Draws of TransformerEngine's NVFP4 kernel, whose threads own blocks of a tile of 128 x 128."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qgate.errors import QgateError
from qgate.formats.philox import LARGEST_SEED, philox, unit

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_TILE = 128
_THREADS = 128
_STAGE = 32
_BLOCK = 16
_GROUP = 4
"""Elements that share a word, a byte each."""
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class TransformerEnginePhilox:
    """Draws of `quantize_transpose_nvfp4_kernel` for a matrix in blocks of 16 along its rows.

    A thread block has a tile of 128 x 128; its thread t = 8 * (r % 16) + c % 128 // 16 quantizes
    the blocks of row r and column c in each half of each stage of 32 rows. It is sequence t + 128 *
    (tile, row by row) of Philox, whose calls give four words each, from `offset` on. A word is for
    four elements, a byte each. Threads of each second quarter of a warp begin with the second half
    of a block.

    seed, offset    the two numbers of `rng_state`; `offset` counts calls
    transposed      the kernel writes the transposed matrix, too: its blocks, 16 along columns, take
                    the first eight words of each stage
    rounds          NVTE_BUILD_NUM_PHILOX_ROUNDS of the build
    bytes           the byte of its word, 0 the lowest, that each of four elements gets: a matter of
                    the device's `cvt.rs`, as PTX describes it, and not compared with one
    """

    seed: int
    offset: int = 0
    transposed: bool = False
    rounds: int = 10
    bytes: tuple[int, int, int, int] = (0, 2, 1, 3)

    def __post_init__(self) -> None:
        limits = {"seed": LARGEST_SEED, "offset": 2**62, "rounds": 100}
        for name, high in limits.items():
            number, low = getattr(self, name), int(name == "rounds")
            if not isinstance(number, int) or not low <= number <= high:
                raise QgateError(f"{name}={number!r} is not allowed; it is from {low} to {high}.")
        if sorted(self.bytes) != list(range(_GROUP)):
            raise QgateError(f"bytes={self.bytes!r} is not allowed; it is an order of 0, 1, 2, 3.")

    def words(self, rows: int, columns: int, device: torch.device | None = None) -> Tensor:
        """Return the word of each element of a matrix as int64, shared by four of them."""
        import torch

        row = torch.arange(rows, dtype=torch.int64, device=device)[:, None]
        column = torch.arange(0, columns, _GROUP, dtype=torch.int64, device=device)[None]
        in_rows, in_columns = row % _TILE, column % _TILE
        thread = row % _BLOCK * (_TILE // _BLOCK) + in_columns // _BLOCK
        tile = row // _TILE * -(-columns // _TILE) + column // _TILE
        bank = thread % 32 // 8
        half = (column % _BLOCK // 8 - bank) % 2
        number = in_rows % _STAGE // _BLOCK * 4 + half * 2 + column % 8 // _GROUP
        number = number + in_rows // _STAGE * 8
        if self.transposed:
            number = number + (in_rows // _STAGE + 1) * 8
        sequence, call = thread + tile * _THREADS, number // 4 + self.offset
        words = (call, call >> 32, sequence, sequence >> 32)
        counter = torch.stack([(word & _WORD).expand(rows, -1) for word in words], -1)
        drawn = philox(counter, self.seed, self.rounds)
        shared = drawn.gather(-1, (number % 4).expand(rows, -1).unsqueeze(-1)).squeeze(-1)
        return shared.repeat_interleave(_GROUP, 1)[:, :columns]

    def uniform(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return a float64 number for each element; leading axes are rows."""
        import torch

        if not shape or shape[-1] % _BLOCK:
            raise QgateError(
                f"a tensor of shape {tuple(shape)} has no draws of TransformerEngine; its last "
                f"axis is a multiple of {_BLOCK}."
            )
        columns = shape[-1]
        words = self.words(math.prod(shape[:-1]), columns, device)
        shift = 8 * torch.tensor(self.bytes, dtype=torch.int64, device=device)
        return unit(words >> shift.repeat(columns // _GROUP), 8, carry=True).view(shape)
