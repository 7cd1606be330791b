"""Scales of arguments that a kernel applies to another argument, or to what is added."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from qgate.causes.faults import Fault
from qgate.kernel_checks.runs import Failing


def swapped_scales(case: Failing) -> Iterator[Fault[list[Any]]]:
    """List arguments that are decoded with the scales of others."""
    scales = case.subject.scales(case.arguments, case.choices)
    for first, second in itertools.permutations(scales, 2):
        ratio = _ratio(scales[first], scales[second])
        if ratio is None:
            continue
        changed = list(case.ideal)
        changed[first] = case.ideal[first] * ratio
        yield Fault(f"argument {first} is decoded with the scale of argument {second}", changed)
        if first < second:
            swapped = list(changed)
            back = _ratio(scales[second], scales[first])
            if back is not None:
                swapped[second] = case.ideal[second] * back
                yield Fault(f"the scales of arguments {first} and {second} are swapped", swapped)


def _ratio(own: Tensor, other: Tensor) -> Tensor | None:
    """Return what scales of another argument are of an argument's own, for each element of it."""
    if not own.numel() or not other.numel() or bool((own == 0).any()):
        return None
    if bool((other == other.reshape(-1)[0]).all()):
        return other.reshape(-1)[0] / own
    by_row = [side for side in (own, other) if side.dim() == 2]
    if len(by_row) < 2 or len(own) != len(other):
        return None
    if any(bool((side != side[:, :1]).any()) for side in by_row):
        return None
    return (other[:, :1] / own[:, :1]).expand_as(own)
