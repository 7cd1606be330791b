"""Scales went to a kernel row by row that reads them in tiles of 128x4.

The preparation of MXFP8 weights put the rows of scales in the kernel's order and left out the second
step, the interleaving of 128 rows and 4 blocks. Many blocks of random weights have equal exponents,
so most misplaced scales do no harm, and the errors look like rounding. The cause is confirmed in a
comment (2026-07-22), and mended by #4093.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit


def pack(encoded: qgate.Encoded) -> tuple[Tensor, Tensor]:
    """Return the elements and a scale for each block of 32."""
    assert encoded.scales is not None
    return encoded.codes.view(torch.float8_e4m3fn).float(), torch.exp2(encoded.scales - 127.0)


def tiles(scales: Tensor) -> Tensor:
    """Interleave scales as tensor cores read them: 32 rows, 4 groups of rows, 4 blocks."""
    rows, blocks = scales.shape
    moved = scales.reshape(rows // 128, 4, 32, blocks // 4, 4).permute(0, 3, 2, 1, 4)
    return moved.reshape(-1)


def kernel(x: Tensor, elements: Tensor, memory: Tensor) -> Tensor:
    """Multiply, with the scales found where tiles of 128x4 have them."""
    rows, blocks = elements.shape[0], elements.shape[1] // 32
    moved = memory.reshape(rows // 128, blocks // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return linear(x, elements * moved.reshape(rows, blocks).repeat_interleave(32, 1))


def interleaved(x: Tensor, elements: Tensor, scales: Tensor) -> Tensor:
    return kernel(x, elements, tiles(scales))


def in_order(x: Tensor, elements: Tensor, scales: Tensor) -> Tensor:
    return kernel(x, elements, scales.reshape(-1))


def arguments(generator: Generator) -> tuple[Tensor, qgate.Encoded]:
    w = torch.randn(128, 256, generator=generator) / 16
    return torch.randn(8, 256, generator=generator), qgate.encode(w, "mxfp8")


EXHIBIT = Exhibit(
    "flashinfer-ai/flashinfer#4087",
    "layouts",
    "Scales were passed row by row to a kernel that reads them in tiles of 128x4.",
    "99.8 % of scales read from a wrong address; errors of one quantum here and there",
    "argument 1 is decoded with scales stored row by row, read in tiles of 128x4",
    arguments, interleaved, in_order, linear,
    options={"pack": {1: pack}, "relations": []}, terms=256,
)  # fmt: skip
