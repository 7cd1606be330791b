"""What formats with scales of their own do to whole rows: one pass, a few rows at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qgate.formats import Format
from qgate.formats.engine.census import error_squares, losses_of, outcomes
from qgate.formats.engine.job import Job, split
from qgate.formats.quantizer import Quantizer
from qgate.summaries.outcomes import FateSums

_PIECE = 2**14
"""Elements at a time: float64 work on them stays in the cache."""


def fate_of_rows(fmt: Format, rows: Tensor, amax: float, massive: float | None = None) -> FateSums:
    """Of rows of a tensor whose largest finite magnitude is `amax`: a scale of the whole tensor is
    the one that it would get without its non-finite values. `massive` is the magnitude above which
    the sums of the rest leave values out."""
    q = Quantizer(fmt)
    whole = Job(torch.full((1,), amax, dtype=rows.dtype), q, looking=True)
    sums = FateSums()
    for piece in rows.split(max(_PIECE // max(rows.shape[-1], 1), 1)):
        job = Job(piece, q, looking=True)
        job.scale = whole.scale if job.scale is not None else None
        job.state = whole.state if job.state is not None else None
        for _, _, wide, parts in split(job):
            hits = outcomes(wide, parts, q)
            squares = error_squares(wide, parts, hits).tolist()
            rest: list[float] = []
            if massive is not None:
                below = error_squares(wide, parts, hits, massive) if massive < math.inf else None
                rest = squares[:2] if below is None else below[:2].tolist()
            pair = dict(zip(("rest_signal", "rest_noise"), rest, strict=False))
            sums += FateSums(losses_of(hits), wide.numel(), *squares, **pair)
    return sums
