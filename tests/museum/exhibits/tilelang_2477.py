"""Signed INT4 was decoded as its bits less seven, not as two's complement.

The fast path of a decoder took four bits as an unsigned number and subtracted 7, so that -8 became 1
and 7 became 0. A slow path beside it extends the sign. Both compile and run without a word.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit


def packed(encoded: qgate.Encoded) -> tuple[Tensor, Tensor]:
    """Return bytes of two codes, the first in the low half, and one scale for each row."""
    assert encoded.scales is not None
    bits = encoded.codes.int() & 15
    return (bits[:, ::2] | bits[:, 1::2] << 4).to(torch.uint8), encoded.scales.reshape(-1, 1)


def bits_of(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1).int()


def sign_extended(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return linear(x, ((bits_of(packed) ^ 8) - 8) * scales)


def less_seven(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return linear(x, (bits_of(packed) - 7) * scales)


def arguments(generator: Generator) -> tuple[Tensor, qgate.Encoded]:
    w = torch.randn(24, 64, generator=generator) / 8
    return torch.randn(16, 64, generator=generator), qgate.encode(
        w, "int4", granularity="channel", axis=0
    )


EXHIBIT = Exhibit(
    "tile-ai/tilelang#2477",
    "packing",
    "Signed 4-bit codes were decoded as their bits minus seven.",
    "-8 to 7 decode to 1 to 8 and -7 to 0, without an error message",
    "argument 1 has 15 of 15 codes decoded wrongly: -7 as 2, -6 as 3, -5 as 4",
    arguments, sign_extended, less_seven, linear,
    options={"pack": {1: packed}, "relations": ["one"]}, terms=64,
)  # fmt: skip
