"""One chain of steps of a tensor core, in torch: exact wherever it runs, so equal everywhere.

The model of a step, and its parameters for FP8 on Hopper, are those of mmaemu 0.1.0 (Apache-2.0)
and of Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004); the code
is written anew. The parameters for operands of 16 bits and TF32 are fitted to results of an H200.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Products that are in memory at once: what fits a cache.
_AT_ONCE = 1 << 17
# The exponent of zero: below any other, also when two are added.
_OF_ZERO = -2000
LEAST_EXPONENTS = {
    torch.float8_e4m3fn: -6, torch.float8_e5m2: -14, torch.float16: -14, torch.bfloat16: -126,
    torch.float32: -126,
}  # fmt: skip
"""The exponent of subnormal numbers of each dtype that a tensor core takes."""


@dataclass(frozen=True)
class TensorCore:
    """Parameters of one step of a tensor core, which adds products to an accumulator.

    Products and accumulator are aligned to the largest exponent among them, where the exponent of a
    product is the sum of its factors' exponents. Each is cut toward zero, the sum of them is exact,
    and it is cut toward zero again.

    group      products of one step
    aligned    bits that a term keeps below the largest exponent
    fraction   bits that the accumulator keeps of its own exponent
    """

    group: int
    aligned: int
    fraction: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which sums of a step are exact; two bits of a product are no fraction."""
        bits = self.aligned + 2 + self.group.bit_length()
        return torch.float32 if bits <= 24 else torch.float64


def chain(
    core: TensorCore,
    a: Tensor,
    b: Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
    start: Tensor | None = None,
) -> Tensor:
    """Return the float32 accumulators [..., M, N] of `a` [..., M, K] and `b` [..., N, K].

    The tensors hold exact values of `dtypes`. `start` is what the accumulators begin with, +0 if
    None. A sum with a factor that is not finite is the one of IEEE 754.
    """
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    rows, columns = a.shape[-2], b.shape[-2]
    flat_a, flat_b = (side.expand(*batch, *side.shape[-2:]).flatten(0, -3) if batch else side[None]
                      for side in (a, b))  # fmt: skip
    x = _Side(core, flat_a, LEAST_EXPONENTS[dtypes[0]])
    y = _Side(core, flat_b, LEAST_EXPONENTS[dtypes[1]])
    first = (
        None if start is None else start.expand(*batch, rows, columns).reshape(-1, rows, columns)
    )
    sums = torch.empty(len(flat_a), rows, columns, dtype=torch.float32, device=a.device)
    for part in _parts(core, *sums.shape):
        begun = None if first is None else first[part].to(core.dtype)
        sums[part] = _chained(core, x, y, part, begun).float()
    if not (x.finite and y.finite and (first is None or bool(first.isfinite().all()))):
        plain = flat_a.double() @ flat_b.double().mT
        plain = plain if first is None else plain + first
        sums = torch.where(plain.isfinite(), sums, plain.float())
    return sums.view(*batch, rows, columns)


class _Side:
    """The factors of one side with their exponents, K first."""

    def __init__(self, core: TensorCore, values: Tensor, least: int) -> None:
        wide = values.to(core.dtype).movedim(-1, 0).contiguous()
        finite = wide.isfinite()
        self.finite = bool(finite.all())
        self.values = wide if self.finite else wide.where(finite, 0.0)
        exponents = (torch.frexp(self.values).exponent - 1).clamp_min(least)
        self.exponents = exponents.where(self.values != 0, _OF_ZERO).to(torch.int16)


def _parts(core: TensorCore, batch: int, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Cut matrices and their rows, so that the products of one step stay few."""
    room = max(_AT_ONCE // (core.group * max(columns, 1)), 1)
    height = min(room, max(rows, 1))
    layers = max(room // height, 1)
    for layer, row in itertools.product(range(0, batch, layers), range(0, rows, height)):
        yield slice(layer, layer + layers), slice(row, row + height)


def _chained(
    core: TensorCore, a: _Side, b: _Side, part: tuple[slice, slice], start: Tensor | None
) -> Tensor:
    x, x_exponents = (t[:, part[0], part[1], None] for t in (a.values, a.exponents))
    y, y_exponents = (t[:, part[0], None] for t in (b.values, b.exponents))
    shape = (x.shape[1], x.shape[2], y.shape[3])
    total = torch.zeros(shape, dtype=core.dtype, device=x.device) if start is None else start
    integers = torch.int32 if core.dtype is torch.float32 else torch.int64
    least = -100 if core.dtype is torch.float32 else -500  # where powers of two are still normal
    for k in range(0, len(x), core.group):
        step = slice(k, k + core.group)
        largest = (x_exponents[step] + y_exponents[step]).amax(0).int()
        own = torch.frexp(total).exponent - 1
        largest = torch.maximum(largest, own.where(total != 0, _OF_ZERO)).clamp_min_(least)
        up = _power_of_two(core.aligned - largest, core.dtype)
        # Integers are cut toward zero as fast as they are made; trunc is not on every processor.
        terms = (x[step] * y[step]).mul_(up).to(integers).sum(0, dtype=integers)
        terms += total.mul(up).to(integers)
        scale = _power_of_two(largest - core.aligned, core.dtype)
        total = _cut(terms.to(core.dtype).mul_(scale), core.fraction)
    return total


def _power_of_two(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is torch.float32:
        return ((exponents + 127) << 23).view(dtype)
    return ((exponents.long() + 1023) << 52).view(dtype)


def _cut(x: Tensor, bits: int) -> Tensor:
    """Cut toward zero to some fraction bits."""
    whole, fraction = (torch.int32, 23) if x.dtype is torch.float32 else (torch.int64, 52)
    return (x.view(whole) & -(1 << (fraction - bits))).view(x.dtype)
