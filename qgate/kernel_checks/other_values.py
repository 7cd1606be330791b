"""Derived inputs with other values in later arguments: zeros, small numbers, other positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qgate.expected.derived import DerivedInput
from qgate.expected.indices import accepts, bound_of, is_index, on_host
from qgate.expected.narrow_floats import is_wide_float
from qgate.kernel_checks.subject import KernelSubject

POSITIONS = "positions"
_MOST_SHIFTS = 6


def other_values(
    subject: KernelSubject, values: list[Any], relations: Sequence[str]
) -> Iterator[DerivedInput]:
    """List inputs with one argument after the first of floats, or one of positions, changed."""
    floats = [position for position, value in enumerate(values) if is_wide_float(value)]
    for position in floats[1:]:
        x, where = values[position], f"(argument {position})"
        changed = {}
        if "zero rows" in relations and x.dim() > 1 and x.shape[-2] > 1:
            # All but the last row, so that whole tiles are zero, as pruned channels are.
            changed["zero rows", f"zero rows {where}"] = torch.zeros_like(x)
            changed["zero rows", f"zero rows {where}"][..., -1:, :] = x[..., -1:, :]
        if "small" in relations and position not in subject.inputs:
            changed["small", f"values times 2^-12 {where}"] = x * 2.0**-12
        for (relation, name), other in changed.items():
            arguments = [*values[:position], other, *values[position + 1 :]]
            yield DerivedInput(relation, name, arguments)
    if POSITIONS in relations:
        yield from _shifted_positions(subject, values)


def _shifted_positions(subject: KernelSubject, values: list[Any]) -> Iterator[DerivedInput]:
    """List positions in other places, the first and the last among them: all by one distance.

    What is distinct stays so. Sorted ones are offsets of parts, as a rule, and are left alone.
    """
    tried = on_host(subject.like, values)
    if tried is None:
        return
    like, host = tried
    for position, value in enumerate(host):
        if (
            not is_index(value)
            or _is_sorted(value)
            or not (bound := bound_of(like, host, position))
        ):
            continue
        for distance in _distances(value, bound):
            moved = torch.where(value < 0, value, (value + distance) % bound)
            if accepts(like, [*host[:position], moved, *host[position + 1 :]]):
                name = f"positions {distance} further (argument {position})"
                moved = moved.to(values[position].device)
                arguments = [*values[:position], moved, *values[position + 1 :]]
                yield DerivedInput(POSITIONS, name, arguments)


def _is_sorted(value: Tensor) -> bool:
    return value.dim() < 1 or bool((value.diff() >= 0).all())


def _distances(value: Tensor, bound: int) -> Iterator[int]:
    """Choose distances until every position was read, as a rule, or so many."""
    present = value[value >= 0].unique()
    seen = set(present.tolist())
    first = [(bound - 1 - int(present.max())) % bound, -int(present.min()) % bound]
    rest = torch.randperm(bound, generator=torch.Generator().manual_seed(0)).tolist()
    chosen = 0
    for distance in dict.fromkeys([*first, *rest[: 4 * _MOST_SHIFTS]]):
        reached = set(((present + distance) % bound).tolist())
        if distance and not reached <= seen:
            seen |= reached
            chosen += 1
            yield distance
        if chosen == _MOST_SHIFTS:
            return
