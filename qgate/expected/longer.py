"""Inputs that are longer than a tile: more rows, heads, experts or terms than are computed at once.

A kernel that is right within one tile may lose all that lies beyond it. 257 entries are one more
than 256, and than whole tiles of 16, 32, 64 and 128.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qgate.expected.derived import CutAxis, DerivedInput
from qgate.expected.indices import accepts
from qgate.expected.narrow_floats import is_wide_float, size_of, widened

Function = Callable[..., Any]
LENGTHS = (257, 129, 65, 33, 17)
"""One more than each tile; the first that the budget allows is tried."""
FEW = 3
"""Entries instead of a single one: batches, heads or experts of which the example has one."""
SMALL = 2**16
"""Values of all arguments up to which nothing else is cut where one dimension grows."""
_NAME = re.compile(r"(\d+) (instead of \d+ along .*)")


@dataclass(frozen=True)
class LongInput:
    """A way to grow the arguments along one axis, to one of several lengths, the longest first.

    is_new  True if the example has one entry: others are made of it
    others  axes that are cut in half where the arguments would be much larger than the example
    """

    axis: CutAxis
    lengths: tuple[int, ...]
    step: int
    others: tuple[CutAxis, ...]
    is_new: bool = False

    def of(self, arguments: Sequence[Any], length: int, seed: int) -> DerivedInput:
        """Derive the input of one length: entries of the example in a random order, repeated.

        Where they are added up, each gets a factor of its own: terms that are the same twice could
        not be told apart.
        """
        generator = torch.Generator().manual_seed(seed)
        index = torch.randint(self.axis.length, (length,), generator=generator)
        grown = self.axis.take(arguments, index)
        whole = self._narrowed(grown, max(size_of(arguments), SMALL))
        if self.is_new or self.axis.is_inner:
            for position, dim in self.axis.dimensions:
                whole[position] = _spread(whole[position], dim, generator)
        name = f"{length} instead of {self.axis.length} along {self.axis}"
        is_part = not self.is_new and size_of(whole) == size_of(grown)
        return DerivedInput("long", name, whole, (self.axis, index) if is_part else None)

    def _narrowed(self, grown: list[Any], most: int) -> list[Any]:
        """Cut other axes in half until so few values are left, last dimensions at the end."""
        for are_features in (False, True):
            lengths = {
                axis: axis.length
                for axis in self.others
                if _has_features(axis, grown) == are_features
            }
            while size_of(grown) > most and lengths:
                axis = max(lengths, key=lambda axis: lengths[axis])
                half = lengths[axis] // 2
                if axis.is_inner:
                    half = half // self.step * self.step
                if half < (FEW if are_features else 1):
                    del lengths[axis]
                    continue
                lengths[axis] = half
                grown = axis.take(grown, torch.arange(half))
        return grown


def _has_features(axis: CutAxis, arguments: Sequence[Any]) -> bool:
    """Return True for a last dimension: kernels are made for some sizes of it."""
    return any(dim == arguments[position].dim() - 1 for position, dim in axis.dimensions)


def is_longer(name: str, other: str) -> bool:
    """Tell by the names of two inputs if one is longer than the other, of one kind and axis.

    Lengths in whole blocks are of one kind, those one beyond a tile of another.
    """
    matches = _NAME.fullmatch(name), _NAME.fullmatch(other)
    if matches[0] is None or matches[1] is None or matches[0][2] != matches[1][2]:
        return False
    long, short = (int(match[1]) for match in matches if match)
    return long > short and (long in LENGTHS) == (short in LENGTHS)


def long_inputs(
    like: Function, arguments: Sequence[Any], axes: Sequence[CutAxis], step: int
) -> list[LongInput]:
    """List how arguments can be made longer than a tile; inner axes in whole blocks and beyond."""
    listed = []
    free = tuple(axis for axis in axes if not axis.positions_in)
    for axis in axes:
        beside = tuple(other for other in free if other is not axis)
        if any(position in axis.positions_in for position, _ in axis.dimensions):
            continue
        beyond = tuple(length for length in LENGTHS if length > axis.length)
        if not beyond:
            continue
        if axis.is_inner and step > 1:
            whole = dict.fromkeys(-(-length // step) * step for length in beyond)
            listed.append(LongInput(axis, tuple(whole), step, beside))
        listed.append(LongInput(axis, beyond, step, beside))
    single = _single(like, arguments)
    return [*listed, *(LongInput(axis, (FEW,), step, free, is_new=True) for axis in single)]


def _single(like: Function, arguments: Sequence[Any]) -> Iterator[CutAxis]:
    """Find dimensions of one entry that may have several, in all arguments that have them."""
    tensors = [(p, value) for p, value in enumerate(arguments) if isinstance(value, Tensor)]
    if any(value.device.type != "cpu" for _, value in tensors):
        return
    wide = [widened(value) for value in arguments]
    for dim in range(max((value.dim() for _, value in tensors), default=0)):
        group = tuple((p, dim) for p, v in tensors if v.dim() > dim and v.shape[dim] == 1)
        axis = CutAxis(group, 1, None)
        grown = axis.take(wide, torch.zeros(FEW, dtype=torch.long))
        if group and accepts(like, grown):
            before, after = (like(*values).shape for values in (wide, grown))
            if len(before) != len(after):
                continue
            sizes = list(zip(before, after, strict=True))
            changed = [result_dim for result_dim, (old, new) in enumerate(sizes) if old != new]
            if len(changed) == 1 and sizes[changed[0]] == (1, FEW):
                yield CutAxis(group, 1, changed[0])


def _spread(value: Any, dim: int, generator: torch.Generator) -> Any:
    """Give each entry of a dimension values of its own, by a positive factor."""
    if not is_wide_float(value):
        return value
    shape = [1] * value.dim()
    shape[dim] = value.shape[dim]
    factors = torch.rand(shape, generator=generator) + 0.5
    return (value.double() * factors.to(value.device)).to(value.dtype)
