"""Rows and columns of a weight that are the parent's in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from qgate.checkpoints.causes import ExportFault
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.moved_scales import with_moved_scales

MOST_LINES, SEEN = 4096, 512
"""Lines that are compared with each other at most, and the elements of each that are seen."""
ALIKE = 0.8
"""Least cosine of a line and the parent's that it is."""
FOUND = 0.95
"""Least share of lines that are one of the parent's."""
LINES = ("rows", "columns")


def order_of_lines(values: Tensor, parent: Tensor, axis: int) -> Tensor | None:
    """Return which of the parent's rows (axis 0) or columns each one is; None for no new order."""
    own, parents = (x.float() if axis == 0 else x.float().T for x in (values, parent))
    count, length = own.shape
    if not 2 < count <= MOST_LINES or length < 2:
        return None
    step = -(-length // SEEN)
    units = [
        x / x.norm(dim=1, keepdim=True).clamp(min=1e-30)
        for x in (own[:, ::step], parents[:, ::step])
    ]
    cosines, order = (units[0] @ units[1].T).max(1)
    # Lines of nothing but zeros, or broken ones, stay where they are.
    order = torch.where(cosines >= ALIKE, order, torch.arange(count))
    is_order = bool((order.bincount(minlength=count) == 1).all())
    is_found = float((cosines >= ALIKE).double().mean()) >= FOUND
    is_new = bool((order != torch.arange(count)).any())
    return order if is_order and is_found and is_new else None


def order_text(axis: int, order: Tensor) -> str:
    """Say in words how lines are ordered."""
    count, noun = len(order), LINES[axis]
    steps = (torch.arange(count) - order) % count
    if bool((steps == steps[0]).all()):
        step = int(steps[0])
        side, step = ("before", step) if step <= count // 2 else ("after", count - step)
        return f"{noun} stand in another order: each is the parent's {step} {side} it"
    moved = (order != torch.arange(count)).nonzero().reshape(-1)
    first = int(moved[0])
    if len(moved) == 2:
        return f"{noun} {first} and {int(order[first])} are swapped"
    return (
        f"{noun} stand in another order: {len(moved):,} of {count:,}, {noun[:-1]} {first} is the "
        f"parent's {int(order[first])}"
    )


def order_faults(weight: QuantizedWeight, parent: Tensor) -> Iterator[ExportFault]:
    """Yield the faults of codes in another order, with and without their scales."""
    values = weight.values()
    for axis in (0, 1):
        order = order_of_lines(values, parent, axis)
        if order is None:
            continue
        words, lines = order_text(axis, order), order.argsort()
        changes: list[Callable[[QuantizedWeight], QuantizedWeight]] = []
        if axis == 0 and weight.tile[0] == 1:
            changes.append(partial(_with_scales, lines=lines))
        changes.append(partial(_codes, lines=lines, axis=axis))
        yield from (ExportFault(words, change) for change in changes)


def _codes(weight: QuantizedWeight, lines: Tensor, axis: int) -> QuantizedWeight:
    elements = weight.elements
    # torch gathers no FP8.
    bits = elements.view(torch.uint8) if elements.dtype.itemsize == 1 else elements
    return replace(weight, elements=bits.index_select(axis, lines).view(elements.dtype))


def _with_scales(weight: QuantizedWeight, lines: Tensor) -> QuantizedWeight:
    return with_moved_scales(_codes(weight, lines, 0), lambda x: x[lines])
