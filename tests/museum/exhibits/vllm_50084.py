"""V scales of an NVFP4 cache were written for one attention kernel and read by another.

The writer interleaved the block scales of V over groups of four tokens, as one GPU's attention wants
them, on every GPU. Another kernel reads them token by token. Shapes, dtypes and offsets are right,
and K, whose scales are written token by token, is right, too.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import qgate
from tests.museum import fp4
from tests.museum.exhibit import Exhibit, Tolerance


def written(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements [head, token, 16 of a block] of a cache, and the scales of blocks."""
    encoded = qgate.encode(v, "nvfp4")
    assert encoded.scales is not None
    assert encoded.tensor_scale is not None
    scales = encoded.scales.view(torch.float8_e4m3fn).float() * encoded.tensor_scale
    return fp4.decode(encoded.codes).unflatten(-1, (-1, 16)), scales


def read(elements: Tensor, scales: Tensor) -> Tensor:
    return (elements * scales[..., None]).flatten(-2)


def in_order(v: Tensor) -> Tensor:
    return read(*written(v))


def interleaved(v: Tensor) -> Tensor:
    elements, scales = written(v)
    heads, tokens, groups = scales.shape
    moved = scales.reshape(heads, tokens // 4, 4, 4, groups // 4).permute(0, 1, 3, 4, 2)
    return read(elements, moved.reshape(scales.shape))


def arguments(generator: Generator) -> tuple[Tensor]:
    sizes = (torch.randn(2, 16, 8, 1, generator=generator) / 2).exp() / 8
    return ((torch.randn(2, 16, 8, 16, generator=generator) * sizes).flatten(2),)


EXHIBIT = Exhibit(
    "vllm-project/vllm#50084",
    "layouts",
    "V scales were interleaved over four tokens and read token by token.",
    "V is off by 0.76 of its norm instead of 0.095, and passes assert_close",
    "the result is decoded with scales stored in groups of four rows, read row by row",
    arguments, in_order, interleaved, lambda v: v, output="nvfp4",
    options={"relations": ["one"]}, tolerance=Tolerance(0.5, 1.5), terms=0,
)  # fmt: skip
