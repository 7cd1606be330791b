"""A global scale that is stored as a divisor was multiplied with.

compressed-tensors stores NVFP4's global scale as 1/scale, other exporters as the scale itself. The
loader passed the stored number on, so weights were multiplied by 3,584 where they should have been
divided by it. It is one of two defects of the report; the other is in the order of block scales.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum import fp4
from tests.museum.exhibit import Exhibit


def pack(encoded: qgate.Encoded) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, block scales and the divisor, as compressed-tensors stores them."""
    assert encoded.scales is not None
    assert encoded.tensor_scale is not None
    return encoded.codes, encoded.scales.view(torch.float8_e4m3fn), 1 / encoded.tensor_scale


def product(x: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    by_block = (scales.float() * global_scale).repeat_interleave(16, 1)
    return linear(x, fp4.decode(codes) * by_block)


def inverted(x: Tensor, codes: Tensor, scales: Tensor, divisor: Tensor) -> Tensor:
    return product(x, codes, scales, 1 / divisor)


def as_stored(x: Tensor, codes: Tensor, scales: Tensor, divisor: Tensor) -> Tensor:
    return product(x, codes, scales, divisor)


def arguments(generator: Generator) -> tuple[Tensor, qgate.Encoded]:
    w = torch.randn(24, 64, generator=generator).clamp(-3, 3) / 4
    return torch.randn(16, 64, generator=generator), qgate.encode(w, "nvfp4")


EXHIBIT = Exhibit(
    "modular/modular#6600",
    "scales",
    "A global scale that is stored as a divisor was used as a factor.",
    "garbage from every checkpoint of that kind",
    "argument 1 is decoded with the reciprocal of the scale of the tensor",
    arguments, inverted, as_stored, linear,
    options={"pack": {1: pack}, "relations": ["one"]}, terms=64,
)  # fmt: skip
