"""Counts of bit patterns, 256 or 65,536 of them."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from qgate.kernels import cases, proving
from qgate.kernels.launching import bits, flat_bits, launch, tile

AT_ONCE = 2**30
_TABLES = 16


def count(x: Tensor) -> Tensor | None:
    """How often each pattern of an 8-bit or 16-bit tensor occurs, as int64; None without a kernel.

    The tables hold int32, which a part of 2**30 elements cannot overflow.
    """
    if not proving.serves(x.device):
        return None
    what = f"counts of {str(x.dtype).removeprefix('torch.')} tensors"
    way = ("count", x.dtype)
    return _count(x) if proving.proven(way, x.device, what, lambda: _wrong(x)) else None


def _count(x: Tensor) -> Tensor:
    programs = importlib.import_module("qgate.kernels.programs.counting")
    patterns, room, flat = 256**x.dtype.itemsize, tile(), flat_bits(x)
    total = torch.zeros(patterns, dtype=torch.int64, device=x.device)
    for start in range(0, len(flat), AT_ONCE):
        part = flat[start : start + AT_ONCE]
        tables = torch.zeros(_TABLES, patterns, dtype=torch.int32, device=x.device)
        launch(
            programs.count_patterns, -(-len(part) // room), part, tables, len(part), TILE=room,
            PATTERNS=patterns, TABLES=_TABLES,
        )  # fmt: skip
        total += tables.sum(0, dtype=torch.int64)
    return total


def _wrong(x: Tensor) -> str:
    for trial in _trials(x.dtype):
        expected = counted_by_torch(trial)
        if found := proving.difference(_count(trial.to(x.device)), expected):
            return found
    return ""


def _trials(dtype: torch.dtype) -> list[Tensor]:
    """All patterns often and rarely, one alone, and a length that fills no tile."""
    if dtype.itemsize == 2:
        every = cases.numbers(dtype)
        return [every, cases.ordinary(dtype)[:-3], every[:1], torch.zeros(5000, dtype=dtype)]
    every = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8)
    return [every.repeat(40)[:-3].view(dtype), every[200:].repeat(99).view(dtype)]


def counted_by_torch(x: Tensor) -> Tensor:
    """The definition."""
    patterns = 256**x.dtype.itemsize
    index = bits(x.reshape(-1)).to(torch.int32).bitwise_and_(patterns - 1)
    return torch.bincount(index, minlength=patterns)
