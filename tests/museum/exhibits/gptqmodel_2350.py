"""Zero points of zero became 15 where they are stored less one.

A format stores zero points less one. The conversion from another format subtracted one and packed four
bits of the result: of -1 these are 15. Few groups have a zero point of zero, all weights of which
are 15 steps too low; every other one is right.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.museum.exhibit import Exhibit

GROUP = 32


def encode(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes from 0 to 15, and zero points and scales of groups of a row."""
    groups = w.unflatten(1, (-1, GROUP))
    low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True)
    scales = (high - low) / 15
    zeros = (-low / scales).round()
    return (groups / scales + zeros).round().clamp(0, 15), zeros, scales


def decode(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    return ((codes - zeros) * scales).flatten(1)


def asymmetric(w: Tensor) -> Tensor:
    return decode(*encode(w))


def stored_as_they_are(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    return decode(codes, zeros, scales)


def stored_less_one(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """Decode with zero points that were packed into four bits less one, and read back plus one."""
    packed = (zeros.int() - 1) & 15
    return decode(codes, torch.where(packed == 15, 15, packed + 1), scales)


def arguments(generator: Generator) -> tuple[Tensor]:
    w = torch.randn(24, 128, generator=generator)
    w[[5, 11], 32:64] = w[[5, 11], 32:64].abs()
    return (w,)


EXHIBIT = Exhibit(
    "ModelCloud/GPTQModel#2350", "packing",
    "Zero points were stored minus one, so that 0 became 15 in four bits.",
    "57,276 zero points of 48 layers changed from 0 to 15; perplexity is NaN",
    "2 of 24 rows .5, 11. are off by a number each, .*: a zero point is off",
    arguments, stored_as_they_are, stored_less_one, lambda w: w, {0: asymmetric},
    options={"pack": {0: encode}, "relations": []}, terms=0,
)  # fmt: skip
