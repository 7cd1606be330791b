"""What formats with scales of their own do to whole rows: one pass, a few rows at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from qgate.analysis.portraits._fates import FateSums
from qgate.formats import Format
from qgate.formats.engine.job import Job, element_of, saturated, split
from qgate.formats.engine.parts import Parts
from qgate.formats.quantizer import Quantizer

_PIECE = 2**14
"""Elements at a time: float64 work on them stays in the cache."""


def fate_of_rows(fmt: Format, rows: Tensor, amax: float, massive: float | None = None) -> FateSums:
    """Of rows of a tensor whose largest finite magnitude is `amax`: a scale of the whole tensor is
    the one that it would get without its non-finite values. `massive` is the magnitude above which
    the sums of the rest leave values out."""
    q = Quantizer(fmt)
    whole = Job(torch.full((1,), amax, dtype=rows.dtype), q, looking=True)
    found = FateSums()
    for piece in rows.split(max(_PIECE // max(rows.shape[-1], 1), 1)):
        job = Job(piece, q, looking=True)
        job.scale = whole.scale if job.scale is not None else None
        job.state = whole.state if job.state is not None else None
        for _, _, wide, parts in split(job):
            found += _fate(wide, parts, q, element_of(fmt).min_normal, massive)
    return found


def _fate(
    wide: Tensor, parts: Parts, q: Quantizer, smallest: float, massive: float | None
) -> FateSums:
    """Of values and what they became. Where a block's scale is NaN, comparisons say no."""
    known = ~parts.scale.isnan()
    beyond = saturated(wide, parts, q)
    above = _count(beyond & (wide > 0))
    below = _count(beyond) - above
    zeros = _count((wide == 0) & known)
    underflow = _count(wide.abs() < smallest * parts.scale) - zeros
    flush = _count((parts.elements == 0) & known) - zeros
    kept, wrong = wide.reshape(-1), (parts.elements * parts.scale - wide).view(-1)
    over = float(wrong[beyond.reshape(-1) & wrong.isfinite()].square().sum())
    signal, noise = float(kept @ kept), float(wrong @ wrong)
    if not (math.isfinite(signal) and math.isfinite(noise)):
        above += _count((wide == math.inf) & ~known)
        below += _count((wide == -math.inf) & ~known)
        kept, wrong = kept[wrong.isfinite()], wrong[wrong.isfinite()]
        signal, noise = float(kept @ kept), float(wrong @ wrong)
    n = wide.numel()
    found = FateSums(above, below, underflow, flush, n, n, signal, noise, saturation=over)
    if massive is None:
        return found
    if massive < math.inf:
        few = kept.abs() <= massive
        kept, wrong = kept[few], wrong[few]
    return replace(found, rest_signal=float(kept @ kept), rest_noise=float(wrong @ wrong))


def _count(hits: Tensor) -> int:
    return int(torch.count_nonzero(hits))
