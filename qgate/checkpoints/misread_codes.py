"""Codes that are read otherwise than they were written: in another order, as another format."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from qgate.checkpoints.grids import AWQ_ORDER, QuantizedWeight

Change = Callable[[QuantizedWeight], QuantizedWeight | None]


def misread_codes(weight: QuantizedWeight) -> Iterator[tuple[str, Change, bool]]:
    """Yield what was misread in words, undone, and whether that has another format."""
    for axis, to_order in itertools.product((0, 1), (True, False)):
        read, stored = ("of AWQ", "of their neighbors")[:: 1 if to_order else -1]
        words = f"the codes of each word are read in the order {read}, and stand in that {stored}"
        for has_zeros in (True, False) if axis == 0 and weight.has_zero_points else (False,):
            change = partial(_reordered, axis=axis, to_order=to_order, has_zeros=has_zeros)
            yield words, change, False
    formats = ("fp8_e4m3", "fp8_e5m2")[:: 1 if weight.element == "fp8_e4m3" else -1]
    yield f"codes are read as {formats[0]} and are {formats[1]}", _exchanged_fp8, True


def _reordered(
    weight: QuantizedWeight, axis: int, to_order: bool, has_zeros: bool
) -> QuantizedWeight | None:
    """Reorder eight neighbors, that were read in the order of AWQ's words, or should have been."""
    order = torch.tensor(AWQ_ORDER)
    if weight.shape[axis] % len(order) or weight.element not in ("int4", "uint4"):
        return None
    starts = torch.arange(0, weight.shape[axis], len(order))[:, None]
    lines = (starts + (order.argsort() if to_order else order)).flatten()
    elements = weight.elements.index_select(axis, lines)
    zeros = weight.zero_points
    if has_zeros and zeros is not None and len(zeros) == len(elements):
        zeros = zeros[lines]
    return replace(weight, elements=elements, zero_points=zeros)


def _exchanged_fp8(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Read E4M3 as E5M2, and the other way round."""
    kinds = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    if kinds.pop(weight.element, None) != weight.elements.dtype:
        return None
    ((element, dtype),) = kinds.items()
    return replace(weight, element=element, elements=weight.elements.view(dtype))
