"""A checkpoint with groups of 64 was served by a kernel that reads a scale for every 128.

The loader makes room for scales by the checkpoint's group size, the product is called with a
literal 128 at all six places. Every shape check passes; elements 128 to 255 get the second group's
scale, and the last half of the scales is never read.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit

BY_GROUP = qgate.Quantizer("int4", granularity="block", block=64)


def pack(encoded: qgate.Encoded) -> tuple[Tensor, Tensor]:
    assert encoded.scales is not None
    return encoded.codes.float(), encoded.scales


def product(x: Tensor, codes: Tensor, scales: Tensor, chunk: int) -> Tensor:
    group = torch.arange(codes.shape[1]) // chunk
    return linear(x, codes * scales[:, group])


def group_of_the_checkpoint(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return product(x, codes, scales, codes.shape[1] // scales.shape[1])


def group_of_128(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return product(x, codes, scales, 128)


def arguments(generator: Generator) -> tuple[Tensor, qgate.Encoded]:
    w = torch.randn(24, 256, generator=generator) / 16
    encoded = qgate.encode(w, "int4", granularity="block", block=64)
    return torch.randn(16, 256, generator=generator), encoded


EXHIBIT = Exhibit(
    "sgl-project/sglang#38573",
    "checkpoints",
    "A kernel reads a scale for every 128 elements of a checkpoint with groups of 64.",
    "loads without an error and serves fluent text that is numerically wrong",
    "argument 1 is decoded with scales of groups of 128, not of 64",
    arguments, group_of_the_checkpoint, group_of_128, linear,
    options={"pack": {1: pack}, "relations": ["one"]}, terms=256,
)  # fmt: skip
