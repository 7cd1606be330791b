"""Counts of bit patterns and the largest magnitude of a tensor."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from qgate.kernels import cases, compiling, proving
from qgate.kernels.launching import bits, flat_bits, launch, tile
from qgate.kernels.shapes import kind_of

AT_ONCE = 2**30
_TABLES = 16
_LEAST_SHARE = 2**16
_MOST_COUNTERS = 15
Reduction = Callable[[Tensor], Tensor]


def count(x: Tensor) -> Tensor | None:
    """Count each pattern of an 8-bit or 16-bit tensor, as int64; None without a kernel."""
    work = f"counts of {str(x.dtype).removeprefix('torch.')} tensors"
    if compiling.serves(x.device):
        way = "count in shared memory", "a Triton kernel"
        counts = _reduce(*way, work, x, count_in_shared_memory, count_by_torch, _patterns_to_count)
        if counts is not None:
            return counts
    return _reduce(
        "count", "torch alone", work, x, count_by_kernel, count_by_torch, _patterns_to_count
    )


def count_in_shared_memory(x: Tensor) -> Tensor:
    """Count in a table of each block, of so many patterns as fit.

    The tensor is read once for each part of the patterns: on an H100 twice, for each sign. A block
    has a share of 2**16 numbers or more. No counter of 32 bits overflows below 2**38 numbers.
    """
    flat, width = flat_bits(x), 8 * x.dtype.itemsize
    total = torch.zeros(2**width, dtype=torch.int64, device=x.device)
    if not len(flat):
        return total
    processors, room = compiling.processors(x.device), compiling.shared_memory(x.device) // 4
    bits = min(width, room.bit_length() - 1, _MOST_COUNTERS)
    shares = min(processors, -(-len(flat) // _LEAST_SHARE))
    kernel = compiling.kernel("counting.cu", f"count_{width}_bits", x.device)
    kernel(
        shares << (width - bits), 1024, flat, total, len(flat), shares, bits, shared=4 << bits,
    )  # fmt: skip
    return total


def count_by_kernel(x: Tensor) -> Tensor:
    """Count by a Triton kernel, in tables in the device's memory.

    They hold int32, which a part of 2**30 elements cannot overflow.
    """
    programs = importlib.import_module("qgate.kernels.programs.reductions")
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


def count_by_torch(x: Tensor) -> Tensor:
    """Count by the definition."""
    patterns = 256**x.dtype.itemsize
    index = bits(x.reshape(-1)).to(torch.int32).bitwise_and_(patterns - 1)
    return torch.bincount(index, minlength=patterns)


def largest(x: Tensor) -> Tensor | None:
    """Return the bits of the largest magnitude, without the sign, as one int32.

    They have the order of x's dtype; None without a kernel.
    """
    if kind_of(x.dtype) is None or not x.numel():
        return None
    work = f"the largest magnitude of {str(x.dtype).removeprefix('torch.')} tensors"
    return _reduce(
        "largest", "torch alone", work, x, largest_by_kernel, largest_by_torch, _hard_sizes
    )


def largest_by_kernel(x: Tensor) -> Tensor:
    programs = importlib.import_module("qgate.kernels.programs.reductions")
    flat, room = flat_bits(x), tile()
    most = torch.zeros(1, dtype=torch.int32, device=x.device)
    mask = 0x7FFF if x.dtype.itemsize == 2 else 0x7FFFFFFF
    launch(programs.largest, -(-len(flat) // room), flat, most, len(flat), TILE=room, MASK=mask)
    return most


def largest_by_torch(x: Tensor) -> Tensor:
    """Find the largest magnitude by the definition."""
    native = bits(x.reshape(-1))
    return native.bitwise_and(torch.iinfo(native.dtype).max).amax().reshape(1).to(torch.int32)


def _reduce(
    name: str,
    instead: str,
    work: str,
    x: Tensor,
    kernel: Reduction,
    definition: Reduction,
    trials: Callable[[torch.dtype], Iterable[Tensor]],
) -> Tensor | None:
    """Reduce by a kernel that gave what the definition gives, on this device and of this dtype."""

    def wrong() -> str:
        problems = (
            proving.first_difference(kernel(cases.move(trial, x.device, i)), definition(trial))
            for i, trial in enumerate(trials(x.dtype))
        )
        return next(filter(None, problems), "")

    if not proving.serves(x.device):
        return None
    proven = proving.prove_once((name, x.dtype), x.device, work, wrong, instead)
    return kernel(x) if proven else None


def _patterns_to_count(dtype: torch.dtype) -> Iterable[Tensor]:
    """Return all patterns often and rarely, one alone, and a length that fills no tile."""
    if dtype.itemsize == 2:
        every = cases.numbers(dtype)
        return [
            every.repeat(3)[3:],
            cases.bell_curve(dtype)[:-3],
            every[:1],
            torch.zeros(5000, dtype=dtype),
        ]
    every = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8)
    return [every.repeat(40)[:-3].view(dtype), every[200:].repeat(99).view(dtype)]


def _hard_sizes(dtype: torch.dtype) -> Iterable[Tensor]:
    every = cases.numbers(dtype)
    finite = every[every.isfinite()]
    return every, finite, finite[:5], finite[-77:], -finite[1::2], finite[:1] * 0
