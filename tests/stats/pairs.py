"""Tensors to compare, and a comparison of what was found."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from qgate.stats._portion import ELEMENTS
from qgate.stats.error_stats import ErrorStats

LARGE = 2 * ELEMENTS + 1234


@functools.cache
def pair(size: int = LARGE, seed: int = 0, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(size, generator=generator)
    return reference + noise * torch.randn(size, generator=generator), reference


def same(one: ErrorStats, other: ErrorStats, *, indexed: bool = True) -> None:
    """To the last bit, NaN included."""
    dicts = [stats.to_dict() for stats in (one, other)]
    for record in () if indexed else dicts:
        for element in record["worst"]:
            del element["index"]
    assert repr(dicts[0]) == repr(dicts[1])
