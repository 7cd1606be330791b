"""The inputs of a check beside the example: derived from it, and of shapes that were asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qgate.expected.derived import MISALIGNED, CutAxis, DerivedInput, derive, search_axes
from qgate.expected.dominant import DOMINANT, dominant_inputs
from qgate.expected.indices import accepts, bound_of, is_index, on_host
from qgate.expected.narrow_floats import is_wide_float, take_entries
from qgate.formats import Encoded
from qgate.kernel_checks.record import CheckReport
from qgate.kernel_checks.subject import KernelSubject
from qgate.kernel_checks.watching import TELLING

RISKY = {"offset": 1, "empty": 2}
"""Relations whose inputs come last: a kernel may end the process there."""

POSITIONS = "positions"
_MOST_SHIFTS = 6


def decoded(example: Sequence[Any]) -> list[Any]:
    """Return arguments with the values of those that are encoded."""
    return [
        argument.decode(torch.float32) if isinstance(argument, Encoded) else argument
        for argument in example
    ]


def step_of(subject: KernelSubject) -> int:
    """Return the elements that share a scale, the most of all formats."""
    return max((quantization.step for quantization in subject.slots.values()), default=1)


def axes_of(subject: KernelSubject, example: list[Any], report: CheckReport) -> list[CutAxis]:
    """Find the dimensions that may have other lengths, and list why others must not."""
    axes, fixed = search_axes(subject.like, decoded(example))
    report.left_out.update(fixed)
    for axis in axes:
        for position in axis.positions_in:
            report.left_out[f"shorter cuts of {axis}"] = f"argument {position} may hold positions"
    return axes


def derived_inputs(
    subject: KernelSubject,
    example: list[Any],
    axes: Sequence[CutAxis],
    relations: Sequence[str],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    seed: int,
) -> list[DerivedInput]:
    """List inputs to try beside the example; those that may end the process come last."""
    listed = [
        *_from_example(subject, example, axes, relations, seed),
        *other_shapes(example, shapes, seed),
    ]
    return sorted(listed, key=lambda variant: RISKY.get(variant.relation, 0))


def _from_example(
    subject: KernelSubject,
    example: list[Any],
    axes: Sequence[CutAxis],
    relations: Sequence[str],
    seed: int,
) -> Iterator[DerivedInput]:
    """List derived inputs, those for which format and granularity promise something."""
    packed = {
        position for position, quantization in subject.inputs.items() if quantization.is_packed
    }
    values = decoded(example)
    for variant in derive(values, axes, step_of(subject), relations, seed):
        if variant.name == MISALIGNED and TELLING.get() is None:  # it may end this process
            continue
        if not (packed and variant.relation in ("strided", "transposed", "offset", "nan")):
            yield variant
    yield from other_values(subject, values, relations)
    if DOMINANT in relations:
        yield from dominant_inputs(subject.like, values, axes)
    if "fixed point" in relations and subject.inputs and not packed:
        ideal = subject.ideal(values, dict.fromkeys(subject.slots, 0))
        twice = subject.ideal(ideal, dict.fromkeys(subject.slots, 0))
        rounded = [
            value.to(argument.dtype) if is_wide_float(argument) else argument
            for value, argument in zip(ideal, values, strict=True)
        ]
        if all(
            torch.equal(ideal[p], twice[p]) and torch.equal(rounded[p].double(), ideal[p])
            for p in subject.inputs
        ):
            yield DerivedInput("fixed point", "values that are in the format already", rounded)


def other_shapes(
    example: list[Any], shapes: Sequence[Sequence[tuple[int, ...]]], seed: int
) -> Iterator[DerivedInput]:
    """Make arguments of the shapes that were asked for, with the spread of the example's."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [position for position, value in enumerate(example) if isinstance(value, Tensor)]
    for listed in shapes:
        if not isinstance(listed, Sequence) or not all(isinstance(s, Sequence) for s in listed):
            raise ValueError(
                f"shapes has {listed!r}; give for each further input one shape per tensor, such as "
                "shapes=[((7, 256), (9, 256))]."
            )
        if len(listed) != len(tensors):
            raise ValueError(
                f"shapes has {tuple(listed)!r}; give one shape for each of the {len(tensors)} "
                "tensors among the arguments."
            )
        changed = list(example)
        for position, shape in zip(tensors, listed, strict=True):
            old = example[position]
            if is_wide_float(old):
                spread = float(old.double().std()) if old.numel() > 1 else 1.0
                values = torch.randn(tuple(shape), generator=generator) * spread
                changed[position] = values.to(old.device, old.dtype)
            else:  # codes and positions: those of the example, in another order
                entries = torch.randint(max(old.numel(), 1), tuple(shape), generator=generator)
                flat = take_entries(old.reshape(-1), 0, entries.reshape(-1))
                changed[position] = flat.reshape(tuple(shape))
        name = ", ".join("x".join(map(str, shape)) for shape in listed)
        yield DerivedInput("shapes", f"shapes {name}", changed)


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
