"""Signed numbers of four bits were extended with zeros, so none was negative.

A conversion to float masked the four bits of a code and took them for the number: the stored -8 came
out as 8, -1 as 15. Positive codes are right.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit


def packed(encoded: qgate.Encoded) -> tuple[Tensor, Tensor]:
    """Return words of eight codes, the first in the lowest bits, and the scales of groups."""
    assert encoded.scales is not None
    bits = (encoded.codes.int() & 15).reshape(len(encoded.codes), -1, 8).long()
    return (bits << 4 * torch.arange(8)).sum(2).to(torch.uint32), encoded.scales


def bits_of(words: Tensor) -> Tensor:
    return (words.long()[..., None] >> 4 * torch.arange(8) & 15).flatten(1)


def product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return linear(x, codes.float() * scales.repeat_interleave(32, 1))


def sign_extended(x: Tensor, words: Tensor, scales: Tensor) -> Tensor:
    return product(x, (bits_of(words) << 60) >> 60, scales)


def zero_extended(x: Tensor, words: Tensor, scales: Tensor) -> Tensor:
    return product(x, bits_of(words), scales)


def arguments(generator: Generator) -> tuple[Tensor, qgate.Encoded]:
    w = torch.randn(24, 64, generator=generator) / 8
    return torch.randn(16, 64, generator=generator), qgate.encode(
        w, "int4", granularity="block", block=32
    )


EXHIBIT = Exhibit(
    "tile-ai/tilelang#2482",
    "packing",
    "Signed 4-bit codes were extended with zeros instead of their sign.",
    "a stored -8 decodes to +8, without an error message",
    "argument 1 has negative codes read without their sign",
    arguments, sign_extended, zero_extended, linear,
    options={"pack": {1: packed}, "relations": ["one"]}, terms=64,
)  # fmt: skip
