"""Measured casts of torch to 8-bit floats on a device, each by the name of a convention.

They depend on torch's version and on the device: 466 becomes 448 in float8_e4m3fn of one, and NaN
in that of another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qgate.expected.conventions import conventions
from qgate.formats import get
from qgate.formats.options import Floats
from qgate.formats.settings import QuantizerSettings

FORMATS = {
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e4m3fnuz: "fp8_e4m3fnuz",
    torch.float8_e5m2: "fp8_e5m2",
    torch.float8_e5m2fnuz: "fp8_e5m2fnuz",
}
"""The format of each 8-bit dtype of torch with a sign."""
DTYPES = (*FORMATS, torch.float8_e8m0fnu)
SOURCES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class TorchCast:
    """One cast of torch: from a dtype to one of 8 bits, and the convention that explains it.

    convention  empty if none does; `problem` then has the first number that none explains
    """

    source: torch.dtype
    target: torch.dtype
    convention: str
    problem: str = ""


def torch_casts(device: torch.device | str = "cpu") -> list[TorchCast]:
    """Measure every cast of torch to 8-bit floats on a device, and name its convention."""
    casts = []
    for target, source in itertools.product(DTYPES, SOURCES):
        x = hard_numbers(source)
        casts.append(named_cast(x, x.to(device).to(target).cpu()))
    return casts


def named_cast(x: Tensor, y: Tensor) -> TorchCast:
    """Name the convention by which 8-bit floats were made of numbers."""
    source, actual = x.double().numpy(), y.double().numpy()
    problem = ""
    for name, expected in _candidates(source, y.dtype):
        same = (actual == expected) & (np.signbit(actual) == np.signbit(expected))
        differ = np.flatnonzero(~(same | (np.isnan(actual) & np.isnan(expected))))
        if not len(differ):
            return TorchCast(x.dtype, y.dtype, name)
        at = differ[0]
        problem = problem or f"{source[at]:g} becomes {actual[at]:g}, not {expected[at]:g}"
    return TorchCast(x.dtype, y.dtype, "", problem)


def hard_numbers(dtype: torch.dtype) -> Tensor:
    """Return every number of a 16-bit dtype; of float32 those of bfloat16 and their neighbors."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    if dtype != torch.float32:
        return every.view(dtype)
    x = every.view(torch.bfloat16).float()
    bits = x.view(torch.int32)
    beside = [(bits + step).view(torch.float32) for step in (-1, 1, 2**15)]
    return torch.cat([x, *beside])


def _candidates(x: Floats, target: torch.dtype) -> Iterator[tuple[str, Floats]]:
    """List conventions and the values that they make."""
    if target not in FORMATS:
        yield from _exponents(x)
        return
    for convention in conventions(QuantizerSettings(get(FORMATS[target]), {})):
        yield convention.with_overflow, convention(x)


def _exponents(x: Floats) -> Iterator[tuple[str, Floats]]:
    """List what casts to exponents alone (E8M0) do with fractions, signs and zeros."""
    bits = np.abs(x).astype(np.float32).view(np.int32).astype(np.int64)
    nearest = np.where(bits == 2**22, 0, (bits + 2**22) >> 23)  # 2^-127 has an exponent of its own
    roundings = {"to the nearest power of two, 1.5 up": nearest, "down": bits >> 23}
    for (words, codes), signs, zeros in itertools.product(
        roundings.items(), ("dropped", "to NaN"), ("to 2^-127", "to NaN")
    ):
        spoilt = np.isnan(x) | (codes >= 255)
        spoilt |= (x < 0) & (signs == "to NaN") | (x == 0) & (zeros == "to NaN")
        name = f"{words}, signs {signs}, zeros {zeros}, overflow to NaN"
        yield name, np.where(spoilt, np.nan, np.exp2(codes - 127.0))
