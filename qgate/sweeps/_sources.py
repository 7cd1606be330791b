"""A tensor, its counts or its chunks, as what a sweep adds up: summaries and folded magnitudes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.formats.mx import MxFormat
from qgate.stats import BlockCounts, Counts, Values, all_bf16, block_counts, counts
from qgate.stats.bits import CHUNK, DIRECT, as_tensors, slabs
from qgate.sweeps._sums import Folded

_SUBNORMAL = -127


def summarized(x: Any) -> Counts | Values:
    """Counts where they are exact, else the tensor itself behind the same questions."""
    if isinstance(x, Counts | Values):
        return x
    if isinstance(x, BlockCounts):
        raise QgateError("counts of blocks know no tensor scale; use counts(x), or the tensor.")
    if not isinstance(x, Tensor):
        return counts(x)
    if x.dtype == torch.float32 and all_bf16(x):
        return counts(x, via="bf16")
    return counts(x)


def values_of(summary: Counts | Values) -> Iterator[Folded]:
    """Yield the magnitudes of all values, counted or a piece at a time."""
    if isinstance(summary, Counts):
        yield Folded(*summary.folded())
    else:
        for chunk in summary.chunks():
            yield from Folded.each(chunk)


def blocks_of(
    x: Any, mx: MxFormat, block: int, axis: int, scale_bits: int
) -> tuple[Counts | Values, Iterator[Folded]]:
    """A summary of all values, and magnitudes relative to their block's scale."""
    if block < 1:
        raise QgateError(f"block {block} is not allowed; it is at least 1.")
    if isinstance(x, Tensor) and not -max(x.dim(), 1) <= axis < max(x.dim(), 1):
        raise QgateError(f"axis {axis} is out of range for a tensor of {x.dim()} dimensions.")
    scales = _Scales(mx.element.max_exponent, scale_bits)
    if isinstance(x, np.ndarray):
        x = next(as_tensors(x))
    if isinstance(x, Tensor) and x.dtype in DIRECT and not all_bf16(x):
        return counts(x), _direct_blocks(x, scales, block, axis)
    counted = x
    if not isinstance(x, BlockCounts):
        exactly = isinstance(x, Tensor) and x.dtype not in (torch.bfloat16, torch.float16)
        via: Any = "bf16" if exactly else None
        counted = block_counts(x, block=block, axis=axis, via=via)
    return _unblocked(counted), _counted_blocks(counted, scales)


@dataclass(frozen=True)
class _Scales:
    """The shared exponent of a block before any offset, as the quantizer has it."""

    emax: int
    bits: int

    def of(self, floor_log2_amax: int) -> int:
        limit = 2 ** (self.bits - 1) - 1
        exponent: int = max(floor_log2_amax - self.emax, -limit)
        # A scale of eight bits is clamped above; a narrower one is NaN there, which is left to see.
        return int(min(exponent, limit)) if self.bits == 8 else exponent


def _unblocked(counted: BlockCounts) -> Counts:
    """The counts of all values, whatever their block."""
    total = counted.poisoned.copy()
    for row in counted.rows.values():
        total = total + row
    return Counts(counted.dtype, total)


def _counted_blocks(counted: BlockCounts, scales: _Scales) -> Iterator[Folded]:
    for exponent, (values, weights) in counted.weighted().items():
        own = scales.of(exponent)
        yield Folded.of(np.ldexp(values, -own), weights, own)


def _direct_blocks(x: Tensor, scales: _Scales, block: int, axis: int) -> Iterator[Folded]:
    along = x.detach().movedim(axis, -1) if x.dim() > 1 else x.detach()
    for slab in slabs(along, CHUNK, unit=block):
        length = slab.shape[-1]
        rows = slab.reshape(-1, length).to("cpu", torch.float64).numpy()
        whole = length // block * block
        for part in (rows[:, :whole].reshape(-1, block), rows[:, whole:]):
            if not part.size:
                continue
            good = part[np.isfinite(part).all(axis=1)]
            amax = np.abs(good).max(axis=1)
            exponents = np.where(amax > 0, np.frexp(amax)[1] - 1, _SUBNORMAL)
            for exponent in np.unique(exponents):
                own = scales.of(int(exponent))
                values = good[exponents == exponent].reshape(-1)
                yield from Folded.each(np.ldexp(values, -own), own)
