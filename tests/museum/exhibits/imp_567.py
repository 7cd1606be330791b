"""MXFP4 blocks store their two halves in one byte each; a reader took neighbors from it.

Byte j of a GGML block holds element j in its low half and element j + 16 in its high half. The loader
moved the scale to its place and took the rest for pairs of neighbors, as in its own older format of
the same size: all 32 elements of every block were permuted.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum import fp4
from tests.museum.exhibit import Exhibit


def stored(encoded: qgate.Encoded) -> tuple[Tensor, Tensor]:
    """Return the 16 bytes of every block of 32, and its scale."""
    assert encoded.scales is not None
    blocks = encoded.codes.reshape(*encoded.scales.shape, 2, 16)
    return blocks[:, :, 0] | blocks[:, :, 1] << 4, torch.exp2(encoded.scales - 127.0)


def product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return linear(x, (fp4.decode(codes) * scales[..., None]).flatten(1))


def halves(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return product(x, torch.cat([packed & 15, packed >> 4], -1), scales)


def pairs(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return product(x, torch.stack([packed & 15, packed >> 4], -1).flatten(2), scales)


def arguments(generator: Generator) -> tuple[Tensor, qgate.Encoded]:
    w = torch.randn(24, 128, generator=generator) / 11
    return torch.randn(16, 128, generator=generator), qgate.encode(w, "mxfp4")


EXHIBIT = Exhibit(
    "kekzl/imp#567",
    "packing",
    "Bytes that hold both halves of a block were read as pairs of neighbors.",
    "gibberish from a file that another program reads correctly",
    "argument 1 is read in pairs, but stored as two halves of each block",
    arguments, halves, pairs, linear,
    options={"pack": {1: stored}, "relations": ["one"]}, terms=128,
)  # fmt: skip
