"""Rows of a weight were sorted at loading, and its scales were not.

The checkpoint stores queries, keys and values head by head, the model all queries first. The loader
moved the rows of FP8 codes and left the scales of tiles where they were, so that every tile was
decoded with the scale of another. Scales have the right shape, and nothing fails.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from qgate.testing import tiles
from tests.museum.exhibit import Exhibit

HEADS, SIZE = 2, 64
"""Heads, and the size of each, which is that of tiles: 128 in the model."""


def checkpoint(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 codes and the scale of each square tile."""
    by_tile = w.reshape(len(w) // SIZE, SIZE, -1, SIZE)
    scales = by_tile.abs().amax((1, 3)) / 448
    codes = (by_tile / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.float().reshape(w.shape), scales


def queries_first(rows: Tensor, size: int) -> Tensor:
    """Sort rows from head, kind, size to kind, head, size."""
    return rows.reshape(HEADS, 3, size, -1).transpose(0, 1).reshape(rows.shape)


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    return codes * scales.repeat_interleave(SIZE, 0).repeat_interleave(SIZE, 1)


def scales_sorted(w: Tensor) -> Tensor:
    codes, scales = checkpoint(w)
    return decoded(queries_first(codes, SIZE), queries_first(scales, 1))


def scales_left(w: Tensor) -> Tensor:
    codes, scales = checkpoint(w)
    return decoded(queries_first(codes, SIZE), scales)


def arguments(generator: Generator) -> tuple[Tensor]:
    sizes = torch.tensor([1.0, 1.4, 0.6] * HEADS).repeat_interleave(SIZE)[:, None] / 16
    return (torch.randn(HEADS * 3 * SIZE, 2 * SIZE, generator=generator) * sizes,)


EXHIBIT = Exhibit(
    "sgl-project/sglang#35703",
    "checkpoints",
    "Rows of FP8 codes were reordered at loading, but not the scales of their tiles.",
    "loads without any error and generates a blank frame",
    "tiles of 64x64 are off by a factor each, .*: their scales are off",
    arguments, scales_sorted, scales_left, lambda w: queries_first(w, SIZE),
    output=tiles("fp8_e4m3", SIZE, SIZE), options={"relations": []}, terms=0,
)  # fmt: skip
