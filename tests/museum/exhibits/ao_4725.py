"""The largest magnitude of a block went through bfloat16 before its exponent was taken.

The OCP rule takes the exponent of the largest magnitude, rounded down. 1.998 is 2 in bfloat16, so
its block got twice the scale and lost one bit of every element. Few blocks are hit: those whose
largest magnitude lies within 1/512 below a power of two. A review of the pull request says so
(2026-08-07), not its description.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import qgate
from tests.museum.exhibit import Exhibit

FLOOR = qgate.Quantizer("mxfp8", scale_rule="floor")


def cast(x: Tensor, amax: Tensor) -> Tensor:
    """Quantize blocks of 32 to E4M3 with the exponent of their largest magnitudes."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    _, exponents = torch.frexp(amax)
    scales = torch.exp2(exponents.float() - 1 - 8)[..., None]
    codes = (blocks / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scales).reshape(x.shape)


def largest(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, 32).abs().amax(-1)


def amax_in_float32(x: Tensor) -> Tensor:
    return cast(x, largest(x))


def amax_in_bfloat16(x: Tensor) -> Tensor:
    return cast(x, largest(x).bfloat16().float())


def arguments(generator: Generator) -> tuple[Tensor]:
    x = torch.randn(16, 256, generator=generator)
    x[::4, :32] = x[::4, :32].clamp(-1.9, 1.9)
    x[::4, 5] = 1.998
    return (x,)


EXHIBIT = Exhibit(
    "pytorch/ao#4725",
    "scales",
    "The largest magnitude of a block was rounded to bfloat16 before its exponent was taken.",
    "some values cross the threshold and get the next scale",
    "the result has scales made from magnitudes that were rounded to bfloat16",
    arguments, amax_in_float32, amax_in_bfloat16, lambda x: x, output=FLOOR,
    options={"relations": ["one"]}, terms=0,
)  # fmt: skip
