"""A tensor, its counts or its chunks, as what a sweep adds up: summaries and folded magnitudes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgate.analysis._sums import Folded
from qgate.errors import QgateError
from qgate.formats.mx import MxFormat
from qgate.stats import BlockCounts, Counts, Values, all_bf16, block_counts, counts
from qgate.stats._bits import CHUNK, slabs

_SMALLEST_MX = -127


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


def blocks_of(
    x: Any, mx: MxFormat, block: int, axis: int, limit: int
) -> tuple[Counts | Values, Iterator[Folded]]:
    """A summary of all values, and magnitudes relative to their block's scale with that scale."""
    emax = mx.element.max_exponent
    if isinstance(x, Tensor) and x.dtype == torch.float32 and all_bf16(x):
        x = x.to(torch.bfloat16)
    if isinstance(x, Tensor) and x.dtype in (torch.float32, torch.float64):
        return counts(x), _direct_blocks(x, emax, block, axis, limit)
    counted = x if isinstance(x, BlockCounts) else block_counts(x, block=block, axis=axis)
    return _unblocked(counted), _counted_blocks(counted, emax, limit)


def _unblocked(counted: BlockCounts) -> Counts:
    """The counts of all values, whatever their block."""
    total = counted.poisoned.copy()
    for row in counted.rows.values():
        total = total + row
    return Counts(counted.dtype, total)


def _counted_blocks(counted: BlockCounts, emax: int, limit: int) -> Iterator[Folded]:
    for exponent, (values, weights) in counted.weighted().items():
        scale = 2.0 ** min(max(exponent - emax, -limit), limit)
        yield Folded.of(values / scale, weights, scale)


def _direct_blocks(x: Tensor, emax: int, block: int, axis: int, limit: int) -> Iterator[Folded]:
    along = x.detach().movedim(axis, -1) if x.dim() > 1 else x.detach()
    for slab in slabs(along, CHUNK, unit=block):
        length = slab.shape[-1]
        rows = slab.reshape(-1, length).to("cpu", torch.float64).numpy()
        whole = length // block * block
        for part in (rows[:, :whole].reshape(-1, block), rows[:, whole:]):
            if not part.size:
                continue
            good = part[np.isfinite(part).all(axis=1)]
            amax = np.abs(good).max(axis=1, keepdims=True)
            exponent = np.where(amax > 0, np.frexp(amax)[1] - 1 - emax, _SMALLEST_MX)
            scale = np.exp2(np.clip(exponent, -limit, limit).astype(np.float64))
            every = np.broadcast_to(scale, good.shape).reshape(-1)
            yield Folded.each((good / scale).reshape(-1), every)
