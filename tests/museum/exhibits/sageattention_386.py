"""Long views of a fused buffer were quantized by thread at wrapped addresses.

The kernel that gives every thread's queries a scale computes row * stride in 32 bits. The stride of
a view is the width of the whole buffer, so that rows from 99,864 on were read, and their scales
made, elsewhere: silently, where that address is mapped. Offsets here have 16 bits, and row 64 is
the first one.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import qgate
from qgate.formats.groups import query_threads
from tests.museum.exhibit import Exhibit

WIDTH, DIMENSIONS = (16 + 8 + 8) * 16, 16
"""Of the buffer, with queries of 16 heads, keys and values of 8; and of one head."""


def by_thread(rows: Tensor) -> Tensor:
    """Quantize the first head's queries: thread t of a warp has every eighth of its 32."""
    tokens = rows.unflatten(0, (-1, 4, 8))
    scale = tokens.abs().amax((1, 3), keepdim=True) / 127
    return ((tokens / scale).round() * scale).reshape(rows.shape)


def read(fused: Tensor, offsets: Tensor) -> Tensor:
    """Read a row at each offset; an address before the buffer is one of another allocation."""
    columns = torch.arange(DIMENSIONS)
    return fused.reshape(-1)[(offsets.long()[:, None] + columns) % fused.numel()]


def wide_offsets(fused: Tensor) -> Tensor:
    return by_thread(read(fused, torch.arange(len(fused)) * WIDTH))


def wrapped_offsets(fused: Tensor) -> Tensor:
    offsets = torch.arange(len(fused), dtype=torch.int16) * torch.tensor(WIDTH, dtype=torch.int16)
    return by_thread(read(fused, offsets))


def arguments(generator: Generator) -> tuple[Tensor]:
    return (torch.randn(160, WIDTH, generator=generator),)


EXHIBIT = Exhibit(
    "thu-ml/SageAttention#386", "layouts",
    "Offsets of rows of a fused buffer wrapped, and threads' scales were made of other memory.",
    "silent corruption first, illegal memory access second",
    r"rows 64 to 127 of 160 .*hold what rows 96 to 159 of 160 .*should",
    arguments, wide_offsets, wrapped_offsets, lambda fused: fused[:, :DIMENSIONS],
    output=qgate.Quantizer("int8", groups=query_threads(32)), options={"relations": ["one"]}, terms=0,
)  # fmt: skip
