"""Inputs in which one term decides a sum: other entries of it say nothing then.

The last of many columns hides where terms have one sign, as those of a softmax, a mean or a norm:
of 4,096 it is 0.02 % of the result, less than the rounding to 16 bits. Where it alone is large, its
loss is seen. Each row has another large entry, so that one input looks at as many as there are
rows: the last and the first, those beside powers of two, and all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qgate.expected.derived import CutAxis, DerivedInput, Dimension, are_independent
from qgate.expected.narrow_floats import is_wide_float
from qgate.expected.noise import evaluate

DOMINANT = "dominant"
"""The relation of these inputs."""
FACTORS = (2.0, 8.0, 32.0, 128.0, 512.0)
"""Times the largest value of an argument that are tried for an entry until it decides."""
FEW = 8
"""Terms of which each is seen in any result."""
DECISIVE = 1 / 8
"""Relative change of a typical value that depends on the entry."""


def dominant_inputs(
    like: Callable[..., Any], arguments: Sequence[Any], axes: Sequence[CutAxis]
) -> Iterator[DerivedInput]:
    """Derive one input for each dimension that is summed over."""
    plain: Tensor | None = None
    for position, dim in _candidates(arguments, axes):
        plain = evaluate(like, arguments) if plain is None else plain
        axis = _axis_of(axes, position, dim)
        if axis is not None and not axis.is_inner and not _depend(like, arguments, axis, plain):
            continue
        for factor in FACTORS:
            raised = list(arguments)
            raised[position] = with_large_entries(arguments[position], dim, factor)
            if not bool(raised[position].isfinite().all()) or (
                factor * float(arguments[position].abs().max()) > _most(arguments[position].dtype)
            ):
                break
            try:
                result = evaluate(like, raised)
            except Exception:  # the reference takes no such values
                break
            if _is_decided(plain, result):
                name = f"one large entry in each row along dimension {dim} of argument {position}"
                yield DerivedInput(DOMINANT, name, raised, raised=(position, dim))
                break


def with_large_entries(x: Tensor, dim: int, factor: float) -> Tensor:
    """Return values with one entry in each row along a dimension that is larger than all others."""
    raised = x.clone()
    rows = raised.movedim(dim, -1)
    order = torch.tensor(_in_order(x.shape[dim]), device=x.device)
    columns = order[torch.arange(rows[..., 0].numel(), device=x.device) % len(order)]
    rows.scatter_(-1, columns.reshape(*rows.shape[:-1], 1), float(x.abs().max()) * factor)
    return raised


def _in_order(length: int) -> list[int]:
    """List all entries: the last and the first, those beside powers of two, and the others."""
    near = [2**bit + offset for bit in range(length.bit_length()) for offset in (-1, 0, 1)]
    return [entry for entry in dict.fromkeys((length - 1, 0, *near, *range(length)))
            if entry < length]  # fmt: skip


def _candidates(arguments: Sequence[Any], axes: Sequence[CutAxis]) -> Iterator[Dimension]:
    """List dimensions that may be summed over: of argument 0 all, of others those of inner axes."""
    listed: dict[Dimension, None] = {}
    for axis in axes:
        wide = [entry for entry in axis.dimensions if is_wide_float(arguments[entry[0]])]
        if axis.is_inner and wide:
            listed[wide[0]] = None
    first = next((p for p, value in enumerate(arguments) if is_wide_float(value)), None)
    if first is not None:
        listed.update(((first, dim), None) for dim in range(arguments[first].dim()))
    for position, dim in listed:
        x = arguments[position]
        if x.shape[dim] > FEW and bool(x.isfinite().all()) and bool(x.any()):
            yield position, dim


def _axis_of(axes: Sequence[CutAxis], position: int, dim: int) -> CutAxis | None:
    return next((axis for axis in axes if (position, dim) in axis.dimensions), None)


def _depend(
    like: Callable[..., Any], arguments: Sequence[Any], axis: CutAxis, plain: Tensor
) -> bool:
    """Tell if entries of the result depend on others along an axis: its last half, on the first."""
    assert axis.output is not None
    half = torch.arange(axis.length // 2, axis.length)
    try:
        part = evaluate(like, axis.take(arguments, half))
    except Exception:
        return False
    return not are_independent(plain, part, axis.output, half)


def _is_decided(plain: Tensor, result: Tensor) -> bool:
    """Tell if a typical one of the values that changed is another one now."""
    if result.shape != plain.shape:
        return False
    change, size = (result - plain).abs(), result.abs() + plain.abs()
    changed = change > 0
    return bool(changed.any()) and float((change / size)[changed].median()) >= DECISIVE


def _most(dtype: torch.dtype) -> float:
    """Return the largest number whose square the dtype holds."""
    return math.sqrt(torch.finfo(dtype).max)
