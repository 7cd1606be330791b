"""The scales of a batch were put into tiles of 128x4 as one matrix, and read matrix by matrix.

The quantizer padded the rows of the whole batch to 128, the kernels those of each matrix. With a
number of rows that is no multiple of 128 a tile lies across two matrices: the first matrix is
right, the others are decoded with the scales of other rows, or of padding.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import qgate
from qgate.formats.scale_layouts import TILES_OF_128X4
from tests.museum.exhibit import Exhibit

MATRICES, ROWS, DEPTH = 3, 96, 128


def pack(encoded: qgate.Encoded) -> tuple[Tensor, Tensor]:
    """Return the elements, and the codes of their scales."""
    assert encoded.scales is not None
    return encoded.codes.view(torch.float8_e4m3fn).float(), encoded.scales


def batched(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bmk,bnk->bmn", x, w)


def kernel(elements: Tensor, memory: Tensor, w: Tensor) -> Tensor:
    """Multiply, with the tiles of each matrix after those of the one before."""
    codes = TILES_OF_128X4.load(memory.reshape(len(elements), -1), ROWS, DEPTH // 32)
    return batched(elements * torch.exp2(codes - 127.0).repeat_interleave(32, -1), w)


def by_matrix(elements: Tensor, scales: Tensor, w: Tensor) -> Tensor:
    return kernel(elements, TILES_OF_128X4.store(scales), w)


def as_one_matrix(elements: Tensor, scales: Tensor, w: Tensor) -> Tensor:
    return kernel(elements, TILES_OF_128X4.store(scales.flatten(0, 1)), w)


def arguments(generator: Generator) -> tuple[qgate.Encoded, Tensor]:
    x = torch.randn(MATRICES, ROWS, DEPTH, generator=generator)
    return qgate.encode(x, "mxfp8"), torch.randn(MATRICES, 24, DEPTH, generator=generator) / 11


EXHIBIT = Exhibit(
    "flashinfer-ai/flashinfer#3604",
    "layouts",
    "Scales of a batch were swizzled as one matrix and read matrix by matrix.",
    "garbage in all matrices but the first, unless their rows are multiples of 128",
    "argument 0 is decoded with scales of all matrices stored in tiles of 128x4 as one",
    arguments, by_matrix, as_one_matrix, batched,
    options={"pack": {0: pack}, "relations": []}, terms=DEPTH,
)  # fmt: skip
