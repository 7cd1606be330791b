"""What formats do to the values of a layer, and which quantizer the name of a format stands for.

A mode such as `int8` scales each row by itself. A table over whole tensors does not, so it says so.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qgate.activation_stats.record import PER_TENSOR
from qgate.formats import get
from qgate.formats.quantizer import Quantizer
from qgate.summaries.outcomes import FateSums, Target, fate_of_counts, target_of
from qgate.summaries.pool import Pool
from qgate.summaries.row_outcomes import fate_of_rows


def scaled_by_rows(fmt: Target) -> bool:
    """If modes give each token and output channel a scale of its own in this format.

    Blocks bring theirs, and formats of a wide range are cast as they are.
    """
    return fmt.kind == "element" and fmt.bits < 16 and not fmt.tapered


def quantizer_of(name: str) -> Quantizer:
    """Return the quantizer of rows that the modes of a format use."""
    fmt = get(name)
    return Quantizer(fmt, granularity="channel", axis=0) if scaled_by_rows(fmt) else Quantizer(fmt)


def table_name(name: str) -> str:
    """Return what a table over whole tensors calls a format: with one scale it is another."""
    target = target_of(name)
    return f"{target.name}{PER_TENSOR}" if scaled_by_rows(target) else target.name


def format_losses(
    name: str, pool: Pool, rows: Tensor | None, massive: float, *, wide: bool
) -> FateSums:
    """Return what a format does to pooled values, with the sums of the rest below `massive`.

    `rows` are a share of those of the tensor: formats with scales of their own see nothing else,
    and the errors of `wide` values are of it.
    """
    target = target_of(name)
    rows = torch.empty(0, 1) if rows is None else rows
    if target.kind == "block" or (target.kind == "element" and target.always_scaled):
        return fate_of_rows(target, rows, 0.0 if math.isnan(pool.amax) else pool.amax, massive)
    exact = not wide or target.kind == "dtype"
    values = None if exact else rows.reshape(-1).double().numpy()
    return fate_of_counts(target, pool, values, massive)
