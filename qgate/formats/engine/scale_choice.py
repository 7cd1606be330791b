"""Scale 1 or amax / max: which of the two loses less of each group, in a tapered format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qgate.formats._element import ElementFormat
from qgate.formats.definition import CLEARLY_LESS
from qgate.formats.engine.parts import Call
from qgate.formats.engine.scratch import tracing
from qgate.formats.engine.work import DOUBLE, INFINITY, widen

if TYPE_CHECKING:
    from qgate.formats.engine.job import Job

_COUNTING_PAYS_FROM = 2**17


def better_scale(job: Job, aligned: Tensor, amax_bits: Tensor) -> Tensor:
    """Return `definition.better_scales` of a job, as [outer, groups, 1, inner].

    A group with NaN or Inf keeps the scale that it has.
    """
    amax = widen(amax_bits.view(job.x.dtype))
    unit = DOUBLE.power(torch.frexp(amax)[1].to(torch.int64) - 1)
    unit = unit.masked_fill(amax == 0, 1.0)
    if job.x.dtype.itemsize == 2 and aligned.numel() == 1 and job.x.numel() >= _COUNTING_PAYS_FROM:
        errors = None if tracing() else _counted_errors(job, aligned, unit)
    else:
        errors = None
    plain, scaled = errors if errors is not None else _summed_errors(job, aligned, unit)
    keeps = (scaled < plain * CLEARLY_LESS) | (amax_bits >= INFINITY[job.x.dtype])
    return aligned.where(keeps, torch.ones_like(aligned))


def _summed_errors(job: Job, aligned: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    plain, scaled = (job.rows(1, torch.float64) for _ in range(2))
    for chunk in job.chunks(parts_of_groups=True):
        x, size = widen(chunk.data(job.data)), chunk.group(unit)
        for scale, sums in ((None, plain), (chunk.group(aligned), scaled)):
            squares = _squares(job, x, scale, size)
            chunk.group(sums).add_(squares.sum(2, keepdim=True))
    return plain, scaled


def _counted_errors(job: Job, aligned: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """The same of one group of 16-bit numbers, from how often each of them occurs."""
    counts = torch.zeros(2**16, dtype=torch.int64, device=job.x.device)
    for chunk in job.chunks(parts_of_groups=True):
        codes = chunk.data(job.data).reshape(-1).view(torch.int16).to(torch.int32) + 2**15
        counts += torch.bincount(codes, minlength=2**16)
    there = counts.nonzero().reshape(-1)
    numbers = (there - 2**15).to(torch.int16).view(job.x.dtype)
    x, often = widen(numbers).view(1, 1, -1, 1), counts[there].to(torch.float64).view(1, 1, -1, 1)
    squares = (_squares(job, x, scale, unit) for scale in (None, aligned))
    plain, scaled = ((each * often).sum(2, keepdim=True) for each in squares)
    return plain, scaled


def _squares(job: Job, x: Tensor, scale: Tensor | None, unit: Tensor) -> Tensor:
    """Squared errors in units of a power of two, which keeps those of float64 numbers finite."""
    fmt = job.q.format
    assert isinstance(fmt, ElementFormat)
    parts = fmt.split(x, Call(job.q.deterministic(), DOUBLE, job.double, scale))
    return ((parts.elements * parts.scale - x) / unit).square()
