"""Sweep a codebook over shares of its blocks' own scales."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.formats import BlockFormat
from qgate.formats.codebook import Codebook, CodebookFormat
from qgate.scales.levels import Level
from qgate.stats import Values, counts, massive_beyond
from qgate.sweeps._recording import note_massive, recorded, swept
from qgate.sweeps._share_sums import ShareSums, without_massive_at
from qgate.sweeps.record import SweepParameters, SweepRecord

_ENDS = (0.5, -1.0)
_TRAINED, _SIZE, _SAMPLES = re.compile(r"trained([1-8])"), 64, 2**18


def is_trained(name: str) -> bool:
    """Tell whether a name means levels that are trained on each tensor: trained4 has four bits."""
    return _TRAINED.fullmatch(name) is not None


def trained_on(x: Tensor, name: str, axis: int) -> CodebookFormat:
    """Return levels trained for a tensor's least squared error, in blocks scaled by the largest."""
    match = _TRAINED.fullmatch(name)
    assert match is not None
    rows = x.detach().movedim(axis, -1) if x.dim() else x.detach().reshape(1)
    blocks = [block for block in rows.double().split(_SIZE, -1) if block.numel()]
    scales = [block.abs().amax(-1, keepdim=True) for block in blocks]
    shares = [(block / scale).reshape(-1) for block, scale in zip(blocks, scales, strict=True)]
    weights = [
        scale.square().expand_as(block).reshape(-1)
        for block, scale in zip(blocks, scales, strict=True)
    ]
    numbers, of_scales = torch.cat(shares), torch.cat(weights)
    sound = numbers.isfinite() & of_scales.isfinite()  # blocks of zeros are NaN here
    numbers, of_scales = numbers[sound], of_scales[sound]
    if not len(numbers):
        raise QgateError(f"{name} has no finite number other than zero to train on.")
    step = -(-len(numbers) // _SAMPLES)
    book = Codebook.trained(
        f"{name} levels", numbers[::step].numpy(), int(match[1]), of_scales[::step].numpy()
    )
    return CodebookFormat(name, book, size=_SIZE)


def sweep_shares(
    x: Any,
    fmt: BlockFormat,
    levels: int,
    bounds: tuple[float | None, float | None],
    axis: int,
    named: tuple[str, list[int] | None],
) -> SweepRecord:
    """Measure the format with 2**s times the scale of every block, s in even steps and 0."""
    if isinstance(x, Values) and len(x.tensors) == 1:
        x = x.tensors[0]
    if not isinstance(x, Tensor):
        raise QgateError(
            f"{fmt.name} makes scales of numbers that counts of values do not keep; sweep the "
            "tensor itself."
        )
    numbers = x.detach() if x.dtype.itemsize > 1 else x.detach().float()
    summary = counts(numbers)
    if not summary.finite or summary.amax == 0:
        raise QgateError(f"{named[0]} has no finite number other than zero: nothing to sweep.")
    high, low = (
        end if end is not None else usual for end, usual in zip(bounds, _ENDS, strict=True)
    )
    if high < low:
        raise QgateError(f"offsets from {high:g} to {low:g} are not allowed; the larger is first.")
    steps = {*np.linspace(high, low, max(levels, 2)).round(4).tolist(), 0.0}
    offsets = [Level(s, ("own",) if s == 0 else ()) for s in sorted(steps, reverse=True)]
    sums = ShareSums(numbers, fmt, offsets, axis)
    if not sums.n:
        raise QgateError(f"{named[0]}: every block holds NaN or Inf, so there is nothing to sweep.")
    parameters: SweepParameters = {
        "levels": levels,
        "max_exp": float(high),
        "min_exp": float(low),
        "alignment": "given" if bounds != (None, None) else "exact",
        "scale_bits": 8,
        "usual": {"kind": "own", "exponent": 0.0},
        "production": None,
        "block": fmt.block,
        "axis": axis,
        "scale_rule": fmt.notes,
    }
    swept_levels = swept(sums, offsets, summary, 8, True)
    for level in swept_levels:
        level["e8m0"] = True  # a float32 scale takes any share
    record = recorded(fmt, summary, named, swept_levels, sums.n, parameters)
    best, beyond = swept_levels[record["advice"]["recommended"]], massive_beyond(summary)
    massive = None
    if beyond < math.inf:
        massive = without_massive_at(numbers, fmt, best["factor"], axis, beyond)
    note_massive(record, beyond, massive)
    return record
