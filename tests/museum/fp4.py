"""FP4 as the kernels of exhibits decode and round it."""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])


def decode(codes: Tensor) -> Tensor:
    """Return the values of E2M1 codes, whose highest of four bits is the sign."""
    sizes = MAGNITUDES[(codes & 7).long()]
    return torch.where(codes > 7, -sizes, sizes)


def nearest(x: Tensor) -> Tensor:
    """Round to E2M1."""
    return MAGNITUDES[torch.bucketize(x.abs(), TIES)].copysign(x)


def to_codes(x: Tensor) -> Tensor:
    """Return the codes of E2M1 that are nearest to values."""
    return torch.bucketize(x.abs(), TIES).to(torch.uint8) | (x < 0).to(torch.uint8) << 3
