"""Say what is wrong with a tensor that is not quantized and is not the parent's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from qgate.checkpoints.methods.compared_rows import ComparedRows
from qgate.checkpoints.orders import order_of_lines, order_text
from qgate.checkpoints.rows import ContiguousRows
from qgate.checkpoints.stored import Checkpoint, StoredEntry
from qgate.text import counted

BEGINNING = 256
"""Elements by which tensors of one shape are told apart."""
FEW = 1 / 16
"""Largest share of rows that are counted, and not called all."""
STEP = 2.0**-7
"""Relative error of a sum that was rounded to bfloat16, with some room."""


def tensor_that_it_is(
    child: Checkpoint, entry: StoredEntry, parent: Checkpoint, is_equal: Callable[[str], bool]
) -> str:
    """Return the tensor of the parent, of the same shape, that one of the child is."""
    count = min(BEGINNING, math.prod(entry.shape))
    own = ContiguousRows(child, entry.name, 1)[0:count]
    for name, other in parent.entries.items():
        if other.shape != entry.shape or name == entry.name:
            continue
        beginning = ContiguousRows(parent, name, 1)[0:count].to(own.dtype)
        if torch.equal(own, beginning) and is_equal(name):
            return name
    return ""


def plain_cause(
    parts: Iterable[tuple[Tensor, Tensor]], shape: tuple[int, ...], compared: ComparedRows | None
) -> str:
    """Name an offset of all values, rows that are wrong, or their order; nothing where it is none.

    parts     the values and the parent's, some elements at a time
    compared  both as rows, where it is a matrix
    """
    width = shape[-1] if len(shape) > 1 else 1
    wrong: set[int] = set()
    low, high, room, start = math.inf, -math.inf, 0.0, 0
    for own, source in parts:
        values, parent = own.reshape(-1).float(), source.reshape(-1).float()
        differs = (values != parent) & ~(values.isnan() & parent.isnan())
        wrong.update(((start + differs.nonzero().reshape(-1)) // width).unique().tolist())
        offsets = values - parent
        low, high = min(low, float(offsets.min())), max(high, float(offsets.max()))
        room = max(room, STEP * float(torch.maximum(values.abs(), parent.abs()).max()))
        start += len(values)
    if high - low <= room < abs(high + low) / 8:
        middle = (high + low) / 2
        return f"every value is {abs(middle):.3g} {'more' if middle > 0 else 'less'}"
    count = start // width
    if len(wrong) <= max(2, FEW * count):
        return _lines_text(sorted(wrong), count, compared)
    if compared is None:
        return ""
    values, parent = compared.leading()
    orders = ((axis, order_of_lines(values, parent, axis)) for axis in (0, 1))
    return next((order_text(axis, order) for axis, order in orders if order is not None), "")


def _lines_text(wrong: list[int], count: int, compared: ComparedRows | None) -> str:
    """Name a few rows, or values of a vector, that are wrong."""
    noun = "row" if compared is not None else "value"
    if compared is None:
        return f"{counted(len(wrong), noun)} of {count:,}, first {noun} {wrong[0]}"
    rows = [compared.read(row, row + 1)[0].float() for row in wrong]
    parents = [compared.parent[row : row + 1][0].float() for row in wrong]
    if len(rows) == 2 and torch.equal(rows[0], parents[1]) and torch.equal(rows[1], parents[0]):
        return f"rows {wrong[0]} and {wrong[1]} are swapped"
    zero = [row for row, values in zip(wrong, rows, strict=True) if not bool(values.any())]
    if len(zero) == len(wrong):
        are = "is" if len(zero) == 1 else "are"
        return f"{counted(len(zero), noun)} of {count:,} {are} zero, first row {zero[0]}"
    return f"{counted(len(wrong), noun)} of {count:,} differ, first row {wrong[0]}"
