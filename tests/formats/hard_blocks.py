"""Blocks with numbers that are hard for formats whose scales come from the data."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import qgate
from qgate.formats import definition
from tests.formats.oracles import assert_same_bits, to_float64


def hard_rows(dtype: torch.dtype) -> Tensor:
    """Normal numbers with a row of zeros, a NaN, an Inf, and a row of tiny numbers."""
    x = torch.randn(24, 200, generator=torch.Generator().manual_seed(0)).to(dtype) * 3
    x[3], x[5, 3], x[6, 4], x[7] = 0, math.nan, math.inf, x[7] * 2.0**-140
    return x


def assert_defined(x: Tensor, name: str, **options: Any) -> Tensor:
    """Quantized, and encoded and decoded, a tensor has the definition's bits; return the values."""
    q = qgate.Quantizer(name, **options)
    expected = definition.quantize(to_float64(x), q)
    exact = qgate.quantize(x, name, dtype=torch.float64, **options)
    assert_same_bits(exact, expected, name, x)
    assert_same_bits(q.encode(x).decode(torch.float64), expected, name, x)
    return exact
