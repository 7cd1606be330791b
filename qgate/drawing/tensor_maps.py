"""Maps of tensors, of at most 96 by 96 cells, in which the largest value is never lost."""

from __future__ import annotations

import itertools
import math
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from qgate.dumps import Record
from qgate.errors import QgateError, unknown
from qgate.stats import serial
from qgate.stats.summary import Floats, Ints
from qgate.summaries.pooling import channel_amax
from qgate.summaries.record import Map

Kind = Literal["tokens", "attention"]

CELLS = 96
_CHUNK = 2**18


def is_convolution(record: Record) -> bool:
    """Tell whether the channels of a tensor are its second axis, not its last."""
    words = f"{record.layer_type} {record.component} {record.module.rpartition('.')[2]}"
    many = len(record.shape) > 3 and record.layer_type != "attention"
    return len(record.shape) > 2 and (many or "conv" in words.lower())


def by_channel(record: Record, values: Tensor) -> Tensor:
    """Return the values with their channels last; of a part of a convolution there are none."""
    if not is_convolution(record):
        return values
    is_whole = values.dim() == len(record.shape)
    return values.movedim(1, -1) if is_whole else values.flatten()


def row_name(record: Record) -> str:
    """Name the rows of a map: what all axes but the channels are."""
    if is_convolution(record):
        return "all other axes"
    return (
        "output channel" if "weight" in record.name and "attention" not in record.name else "token"
    )


def tensor_map(
    tensor: Tensor, kind: Kind = "tokens", *, title: str = "", order: int = 0, rank: int = 0,
    row_name: str = "token",
) -> Map:  # fmt: skip
    """Map a tensor to cells of equal sizes, give or take one row or column.

    tokens: all leading dimensions are rows, which `row_name` names; a cell is the largest finite
    magnitude in it.
    attention: queries by keys, a cell is the largest mean over batch and heads.
    """
    if kind not in get_args(Kind):
        raise unknown("kind of map", kind, get_args(Kind))
    if not tensor.is_floating_point():
        raise QgateError(f"a map is of floating point numbers, not of {tensor.dtype}.")
    x = tensor.detach().cpu().resolve_neg()
    x = x.reshape(1, -1) if x.dim() < 2 else x
    attention = _Attention() if kind == "attention" else None
    table = x.flatten(0, -2) if attention is None else x.flatten(0, -3) if x.dim() > 2 else x[None]
    rows, columns = table.shape[-2:]
    record = Map(
        title=title, kind=kind, rows=rows, columns=columns, cells=[], order=order, rank=rank
    )
    if row_name != "token":
        record["row_name"] = row_name
    if not table.numel():
        return record
    starts = _starts(columns)
    with serial():
        for first, last in itertools.pairwise([*_starts(rows).tolist(), rows]):
            if attention is None:
                line = channel_amax(table[first:last])
            else:
                line = attention.read(table[:, first:last])
            record["cells"].append(np.maximum.reduceat(line, starts).tolist())
    if attention is not None and attention.rows:
        record["entropy_bits"] = attention.bits / attention.rows
        record["first_key"] = attention.first / attention.rows
    return record


def _starts(n: int) -> Ints:
    cells = min(n, CELLS)
    return np.arange(cells) * n // cells


class _Attention:
    """Sums over queries; rows that are no distribution do not count."""

    def __init__(self) -> None:
        self.rows = 0
        self.bits = self.first = 0.0

    def read(self, x: Tensor) -> Floats:
        """Reduce [heads, queries, keys] to the largest mean over heads of each key."""
        heads, queries, keys = x.shape
        largest = np.zeros(keys)
        step = max(_CHUNK // (heads * keys), 1)
        for start in range(0, queries, step):
            part = x[:, start : start + step]
            part = part if part.dtype == torch.float64 else part.to(torch.float32)
            finite = part.isfinite()
            whole = bool(finite.all())
            addends = part if whole else part.where(finite, 0.0)
            divisor = heads if whole else finite.sum(0).clamp_(min=1)
            mean = (addends.sum(0, dtype=torch.float64) / divisor).abs_().amax(0)
            np.maximum(largest, mean.numpy(), out=largest)
            self._add(part.reshape(-1, keys))
        return largest

    def _add(self, rows: Tensor) -> None:
        totals = rows.sum(1, keepdim=True)
        good = (totals > 0) & totals.isfinite() & (rows.amin(1, keepdim=True) >= 0)
        if not bool(good.all()):
            rows, totals = rows[good.view(-1)], totals[good.view(-1)]
        shares = rows / totals
        self.rows += len(shares)
        self.first += float(shares[:, 0].sum(dtype=torch.float64))
        entropy = torch.special.entr(shares).sum(dtype=torch.float64)
        self.bits += float(entropy) / math.log(2)
