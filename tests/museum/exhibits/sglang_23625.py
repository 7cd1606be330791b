"""FP4 weights had their codes in the other order of nibbles than the kernel.

The checkpoint's bytes hold the first of two neighboring weights in the high half, the kernel takes it
from the low half. It was one of four defects between checkpoint, loader and kernel that made
one symptom.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum import fp4
from tests.museum.exhibit import Exhibit


def checkpoint(encoded: qgate.Encoded) -> tuple[Tensor, Tensor]:
    """Return bytes with the first code in the high half, and the scale of each block."""
    assert encoded.scales is not None
    assert encoded.tensor_scale is not None
    scales = encoded.scales.view(torch.float8_e4m3fn).float() * encoded.tensor_scale
    return encoded.codes[:, ::2] << 4 | encoded.codes[:, 1::2], scales


def kernel(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Take the first code from the low half of each byte."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    return linear(x, fp4.decode(codes) * scales.repeat_interleave(16, 1))


def nibbles_swapped(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return kernel(x, packed >> 4 | packed << 4, scales)


def nibbles_as_stored(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return kernel(x, packed, scales)


def arguments(generator: Generator) -> tuple[Tensor, qgate.Encoded]:
    w = torch.randn(24, 64, generator=generator) / 8
    return torch.randn(16, 64, generator=generator), qgate.encode(w, "nvfp4")


EXHIBIT = Exhibit(
    "sgl-project/sglang#23625",
    "packing",
    "The two codes of each byte were stored in the order opposite to the kernel's.",
    "pure-white images",
    "argument 1 has neighboring codes swapped",
    arguments, nibbles_swapped, nibbles_as_stored, linear,
    options={"pack": {1: checkpoint}, "relations": ["one"]}, terms=64,
)  # fmt: skip
