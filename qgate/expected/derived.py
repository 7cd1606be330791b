"""Inputs derived from an example: other lengths, single rows, batches, views, special values.

Which dimensions of which arguments belong together is learned from the reference function:
dimensions are cut one at a time, then together with those of equal length, until it accepts. That
is tried on the CPU where integers are among the arguments, which may be positions: see indices.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qgate.expected.indices import accepts, bound_of, is_index, on_host, with_position
from qgate.expected.narrow_floats import is_wide_float, take_entries
from qgate.expected.noise import plain_attention
from qgate.expected.stages import without_casts

Function = Callable[..., Any]
Dimension = tuple[int, int]
"""The position of an argument and one of its dimensions."""

SPECIAL = ("zero rows", "nan")
"""Relations about values that no ordinary input has."""
RELATIONS = {
    "one": "one row alone, the first and the last, gives what it gives in the example",
    "odd": "3, 17 and 31 rows",
    "tail": "one row more than whole tiles of 16 to 256; a partial block",
    "batch": "more rows than the example has",
    "prefix": "fewer rows, shorter sums in whole blocks",
    "permuted": "rows in another order",
    "strided": "every second element of a larger tensor, with NaN between them",
    "transposed": "transposed memory",
    "large": "values times 2^12",
    "small": "values times 2^-12, also of arguments that are not quantized",
    "zero rows": "every fourth row of argument 0 zero, and all but the last of each other one",
    "dominant": "one entry of each row so large that it decides a sum, each in another column",
    "positions": "integers that are positions, all of them further by one distance",
    "nan": "one NaN, and one Inf: they do not vanish, and nothing else changes",
    "long": "257 entries of each dimension, one more than whole tiles of 16 to 256",
    "again": "the second and the fifth call with other values in the same memory",
    "offset": "memory that begins 64 bytes, or one element, after its storage",
    "empty": "no rows",
    "fixed point": "values that are in the format already",
}
"""Relations that a kernel is checked for, and the inputs that each derives."""


MISALIGNED = "memory that begins one element later"
"""An input at which kernels that take aligned memory for granted end their process."""


@dataclass(frozen=True)
class CutAxis:
    """Dimensions of arguments that have one length; inner ones do not appear in the result.

    Of a causal one later entries change nothing before them, and every entry needs those before.
    `positions_in` has the integer arguments that may hold positions along it.
    """

    dimensions: tuple[Dimension, ...]
    length: int
    output: int | None
    is_causal: bool = False
    positions_in: tuple[int, ...] = ()

    @property
    def is_inner(self) -> bool:
        return self.output is None

    @property
    def cuts_rows(self) -> bool:
        """True for a dimension of the first argument, by which other arguments are batched."""
        return any(position == 0 for position, _ in self.dimensions)

    def take(self, arguments: Sequence[Any], index: Tensor) -> list[Any]:
        """Return the arguments with these entries of the axis, in contiguous memory."""
        cut = list(arguments)
        for position, dim in self.dimensions:
            cut[position] = take_entries(cut[position], dim, index)
        return cut

    def keeps_positions(self, arguments: Sequence[Any], cut: Sequence[Any], count: int) -> bool:
        """Tell if no integer that may be a position lies beyond so many entries."""
        for position in self.positions_in:
            largest = int(arguments[position].max())
            if largest > self.length or not cut[position].numel():
                continue
            # An end is one more than the last position.
            if int(cut[position].max()) >= count + (largest == self.length):
                return False
        return True

    def may_be_empty(self, arguments: Sequence[Any]) -> bool:
        """Return True for rows of argument 0: kernels divide by the length of anything else."""
        dims = [dim for position, dim in self.dimensions if position == 0]
        if not dims or self.is_causal:
            return False
        count = arguments[0].dim()
        is_row = dims[0] < count - 1 or count == 1
        return is_row and (count <= 2 or len(self.dimensions) == 1)

    def __str__(self) -> str:
        return ", ".join(
            f"dimension {dim} of argument {position}" for position, dim in self.dimensions
        )


@dataclass(frozen=True)
class DerivedInput:
    """Arguments derived from the example, the relation they are for, and a name for both.

    `cut` has the axis, and which of the example's entries were taken along it, in which order;
    `raised` the dimension along which each row has one large entry.
    """

    relation: str
    name: str
    arguments: list[Any]
    cut: tuple[CutAxis, Tensor] | None = None
    raised: Dimension | None = None


def find_axes(like: Function, arguments: Sequence[Any]) -> list[CutAxis]:
    """Find groups of dimensions that can be cut together."""
    return search_axes(like, arguments)[0]


def search_axes(like: Function, arguments: Sequence[Any]) -> tuple[list[CutAxis], dict[str, str]]:
    """Find groups of dimensions that can be cut together, and say why others must not be."""
    tried = on_host(without_casts(like), arguments)
    if tried is None:
        return [], {
            "inputs of other lengths": "the reference keeps tensors of a device, and integers may "
            "be positions: a wrong one would end the device"
        }
    like, arguments = tried
    whole = _shape(like, arguments)
    if whole is None:
        return [], {}
    axes: list[CutAxis] = []
    settled: set[Dimension] = set()
    singles, groups = _candidates(arguments)
    # Some functions read beyond an argument that is shorter than its partner, so one that stands
    # alone in a sum is taken for an axis only after pairs were tried. Others ignore what is longer
    # than its partner, so what cannot grow is taken only after all that can.
    tries = [
        (listed, may_be_inner, grows)
        for grows in (True, False)
        for listed, may_be_inner in ((singles, False), (groups, True), (singles, True))
    ]
    for listed, may_be_inner, grows in tries:
        for group in listed:
            if settled & set(group):
                continue
            axis = _axis(like, arguments, group, whole, grows)
            if axis is not None and (may_be_inner or not axis.is_inner):
                axes.append(axis)
                settled |= set(group)
    return _without_indexed(like, arguments, axes)


def _without_indexed(
    like: Function, arguments: Sequence[Any], axes: list[CutAxis]
) -> tuple[list[CutAxis], dict[str, str]]:
    """Leave out dimensions that integers index, and mark those that they may index."""
    integers = [position for position, value in enumerate(arguments) if is_index(value)]
    bounds = {position: bound_of(like, arguments, position) for position in integers}
    free: list[CutAxis] = []
    fixed: dict[str, str] = {}
    for axis in axes:
        if all(position in integers for position, _ in axis.dimensions):
            free.append(axis)
            continue
        possible = []
        for position, bound in bounds.items():
            if bound is None and int(arguments[position].max()) <= axis.length:
                possible.append(position)
            elif bound == axis.length:
                last = with_position(arguments, position, axis.length - 1)
                if not accepts(like, axis.take(last, torch.arange(axis.length - 1))):
                    fixed[f"cuts of {axis}"] = f"argument {position} holds positions in it"
        if f"cuts of {axis}" not in fixed:
            free.append(replace(axis, positions_in=tuple(possible)))
    return free, fixed


def are_independent(whole: Tensor, part: Tensor, dim: int, entries: Tensor) -> bool:
    """Return False where entries of a result depend on each other, as channels of a norm do."""
    rows = whole.index_select(dim, entries.to(whole.device))
    if part.shape != rows.shape:
        return False
    largest = float(whole.nan_to_num(0.0, 0.0, 0.0).abs().max()) if whole.numel() else 0.0
    return bool(torch.allclose(part, rows, rtol=1e-9, atol=1e-12 * largest, equal_nan=True))


def _axis(
    like: Function,
    arguments: Sequence[Any],
    group: list[Dimension],
    whole: tuple[int, ...],
    grows: bool,
) -> CutAxis | None:
    """Return dimensions as an axis if the function accepts other lengths, longer ones if asked."""
    length = arguments[group[0][0]].shape[group[0][1]]
    if length < 2:
        return None
    axis = CutAxis(tuple(group), length, output=None)
    changed: list[int] = []
    # Two lengths: what broadcasts accepts one entry of an axis that is not free.
    for count in (*([length + 1] if grows else []), length - 1, max(1, length // 2)):
        shape = _shape(like, axis.take(arguments, torch.arange(count) % length))
        if shape is None or len(shape) != len(whole):
            return None
        changed = [
            dim for dim, (new, old) in enumerate(zip(shape, whole, strict=True)) if new != old
        ]
        if len(changed) > 1 or any(shape[dim] != count for dim in changed):
            return None
    return CutAxis(tuple(group), length, changed[0] if changed else None)


def _candidates(
    arguments: Sequence[Any],
) -> tuple[list[list[Dimension]], list[list[Dimension]]]:
    """List single dimensions, and groups of equal ones of several arguments, the largest last."""
    dimensions = [
        (position, dim)
        for position, argument in enumerate(arguments)
        if isinstance(argument, Tensor)
        for dim in range(argument.dim())
    ]
    by_length: dict[int, list[Dimension]] = {}
    for position, dim in dimensions:
        by_length.setdefault(arguments[position].shape[dim], []).append((position, dim))
    groups = [
        list(group)
        for size in range(2, len(arguments) + 1)
        for equal in by_length.values()
        for group in itertools.combinations(equal, size)
        if len({position for position, _ in group}) == size
    ]
    return [[dimension] for dimension in dimensions], groups


def _shape(like: Function, arguments: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the shape of the result, None where the function refuses."""
    try:
        with plain_attention():
            result = like(*arguments)
    except Exception:
        return None
    return tuple(result.shape) if isinstance(result, Tensor) else None


def derive(
    arguments: Sequence[Any],
    axes: Sequence[CutAxis],
    step: int,
    relations: Sequence[str],
    seed: int,
) -> Iterator[DerivedInput]:
    """Derive inputs for the relations asked for; inner axes keep whole multiples of `step`."""
    generator = torch.Generator().manual_seed(seed)
    for axis in axes:
        for relation, name, index in _cuts(axis, step, generator):
            if relation in relations:
                cut = axis.take(arguments, index)
                if axis.keeps_positions(arguments, cut, len(index)):
                    yield DerivedInput(relation, f"{name} along {axis}", cut, (axis, index))
    floats = [
        position
        for position, argument in enumerate(arguments)
        if isinstance(argument, Tensor) and argument.is_floating_point()
    ]
    # Codes of 8-bit floats, and the scales beside them, are fixed.
    first = [position for position in floats[:1] if is_wide_float(arguments[position])]
    for relation, name, positions, change in (
        ("strided", "strided views", floats, _strided),
        ("transposed", "transposed memory", floats, _transposed),
        ("large", "values times 2^12", first, lambda x: x * 2.0**12),
        ("small", "values times 2^-12", first, lambda x: x * 2.0**-12),
        ("zero rows", "zero rows", first, _zeroed),
        ("nan", "one NaN", first, lambda x: _poisoned(x, float("nan"))),
        ("nan", "one Inf", first, lambda x: _poisoned(x, float("inf"))),
    ):
        if relation in relations and positions:
            where = "" if len(positions) > 1 else f" (argument {positions[0]})"
            changed = [
                change(argument) if position in positions else argument
                for position, argument in enumerate(arguments)
            ]
            yield DerivedInput(relation, f"{name}{where}", changed)
    if "offset" in relations:
        for name, size in (("memory that begins 64 bytes later", 64), (MISALIGNED, 1)):
            shifted = [_offset(v, size) if isinstance(v, Tensor) else v for v in arguments]
            yield DerivedInput("offset", name, shifted)
    # Last: what a kernel divides by a length of nothing may end the process.
    for axis in axes if "empty" in relations else ():
        none = torch.arange(0)
        if axis.may_be_empty(arguments):
            name = f"none of {axis.length} along {axis}"
            yield DerivedInput("empty", name, axis.take(arguments, none), (axis, none))


def _cuts(
    axis: CutAxis, step: int, generator: torch.Generator
) -> Iterator[tuple[str, str, Tensor]]:
    """List other lengths and orders of one axis: relation, name, entries."""
    length = axis.length
    if axis.is_inner:
        for count in sorted({length // step // 2 * step, (length // step - 1) * step}):
            if 0 < count < length:
                yield "prefix", f"the first {count} of {length}", torch.arange(count)
        if length > step > 1:
            yield "tail", f"a partial block: {length - 1} of {length}", torch.arange(length - 1)
        elif length > 2:
            yield "odd", f"{length - 1} of {length}", torch.arange(length - 1)
        return
    yield "one", f"the first of {length}", torch.arange(1)
    if not axis.is_causal:
        yield "one", f"the last of {length}", torch.arange(length - 1, length)
    for prime in (3, 17, 31):
        if prime < length:
            yield "odd", f"{prime} of {length}", torch.arange(prime)
    for tile in (16, 32, 64, 128, 256):
        if tile < length - 1:
            yield "tail", f"{tile + 1} of {length}", torch.arange(tile + 1)
    if not axis.is_causal:
        longer = length + length // 2 + 1
        yield "batch", f"{longer} instead of {length}", torch.arange(longer) % length
    if length > 2:
        yield "prefix", f"the first {length - 1} of {length}", torch.arange(length - 1)
    if axis.is_causal:
        return
    order = torch.randperm(length, generator=generator)
    yield "permuted", f"{length} in another order", order


def _strided(x: Tensor) -> Tensor:
    """Return the same numbers as every second one of a larger tensor, NaN between them."""
    if not x.dim():
        return x
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
    wide[..., ::2] = x
    return wide[..., ::2]


def _transposed(x: Tensor) -> Tensor:
    return x if x.dim() < 2 else x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _offset(x: Tensor, size: int) -> Tensor:
    """Return the same numbers in memory that begins bytes, or one element, after its storage."""
    if not x.numel():
        return x
    before = max(size // x.dtype.itemsize, 1)
    return x.new_empty(x.numel() + before)[before:].view(x.shape).copy_(x)


def _zeroed(x: Tensor) -> Tensor:
    if not x.numel():
        return x
    rows = x.clone().reshape(-1, x.shape[-1]) if x.dim() else x.clone().reshape(1, 1)
    rows[:: max(2, len(rows) // 4)] = 0.0
    return rows.reshape(x.shape)


def _poisoned(x: Tensor, value: float) -> Tensor:
    if not x.numel():
        return x
    changed = x.clone().reshape(-1)
    changed[len(changed) // 3] = value
    return changed.reshape(x.shape)
