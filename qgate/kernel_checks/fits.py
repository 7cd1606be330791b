"""Results of a kernel beside what an arithmetic gives, compared bit for bit.

Values that differ must lie within float noise, or within what float noise does to the roundings
inside, and be few and scattered: a rounding near a tie falls otherwise, a defect does not look like
that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qgate.expected.derived import are_independent, find_axes
from qgate.expected.intermediates import HALVES, SUMS, Arithmetic, Noise
from qgate.expected.near_ties import MOST, settle
from qgate.expected.noise import Expected, evaluate, noise_before_casts, smoothed
from qgate.expected.operators import Operators, evaluate_as, trace
from qgate.expected.stages import StagedFunction
from qgate.kernel_checks.runs import EXAMPLE, KernelRun
from qgate.kernel_checks.subject import Choices, KernelSubject

OTHERWISE = 0.01
"""Share of the values that float noise may round otherwise than expected."""
UNSETTLED = 0.1
"""Share of unexplained values up to which values next to ties of rounding are tried."""
CONCENTRATED = 0.25
"""Share of the values of one row, column or head from which they are no accident."""
FEW = 3
"""Values of a row, column or head that may differ whatever its length."""
FLIPS = 8.0
"""Times the RMS effect that float noise has through the roundings inside."""
FLIP_RUNS, FURTHER_FLIP_RUNS = 4, 2
"""Redrawn results of the first input that is looked at, and of others, whose flips are no fewer."""
KNOWN_WIDTH = 2.0**-21
"""Relative room of a known arithmetic, whose sums are definite: scales may be multiplied before."""
SAMPLE = 64
"""Rows and columns of large results that are looked at."""
LARGE = 2**16
"""Elements of a result from which on a sample is looked at."""


@dataclass(frozen=True)
class Case:
    """One run, or a sample of it: dequantized arguments, what came of them, and exact results."""

    subject: KernelSubject
    choices: Choices
    name: str
    ideal: list[Any]
    scales: dict[int, Tensor]
    actual: Tensor
    exact: Expected
    halves: tuple[torch.dtype, ...]
    """The dtypes of 16 bits among those of the result and of the arguments."""
    arguments: list[Any] | None = None
    """Those of the run, if this is all of it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "subject", self.subject.under(self.choices))

    @classmethod
    def of(cls, subject: KernelSubject, choices: Choices, run: KernelRun) -> Case:
        """Return the case of a run; of a large result, of some of its rows and columns."""
        exact = subject.expected(run.arguments, choices, ties=False)
        ideal = subject.ideal(run.arguments, choices)
        scales = subject.scales(run.arguments, choices)
        tensors = [run.actual, *(x for x in run.arguments if isinstance(x, Tensor))]
        halves = tuple(
            dtype for dtype in dict.fromkeys(t.dtype for t in tensors) if dtype in HALVES
        )
        about = subject, choices, run.name, ideal, scales, run.actual, exact, halves
        case = cls(*about, run.arguments)
        return case if run.actual.numel() < LARGE or subject.output else case.sampled(SAMPLE)

    def part_of(self, values: Tensor) -> Tensor | None:
        """Return the entries of the example's values that this case has; None if it is no part."""
        if self.arguments is None:
            return None
        return self.subject.part_of(values, self.arguments, self.choices)

    def sampled(self, count: int) -> Case:
        """Return some rows and columns of the case, if they are independent of the others."""
        generator = torch.Generator().manual_seed(0)
        case = replace(self, arguments=None)
        for axis in find_axes(self.subject.like, self.ideal):
            dim = axis.output
            if dim is None or axis.length <= count:
                continue
            index = torch.randperm(axis.length, generator=generator)[:count].sort().values
            ideal = axis.take(case.ideal, index)
            scales = {
                position: axis.take(_in_place(case.ideal, position, scale), index)[position]
                for position, scale in case.scales.items()
            }
            part = evaluate(self.subject.like, ideal)
            if not are_independent(case.exact.values, part, dim, index):
                continue
            actual = case.actual.index_select(dim, index.to(case.actual.device))
            exact = case.exact.select(dim, index)
            case = replace(case, ideal=ideal, scales=scales, actual=actual, exact=exact)
        return case

    def near_codes(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the other codes of values next to a tie: argument, place in it, and value."""
        arguments = self.arguments or []
        for position, quantization in self.subject.inputs.items() if arguments else ():
            if quantization.is_packed:
                continue
            about = position, arguments[position], self.choices
            ideal = self.subject.cast(*about)[0].reshape(-1)
            for other in self.subject.cast(*about, others=True):
                for place in (other.reshape(-1) != ideal).nonzero().flatten().tolist():
                    yield position, place, other.reshape(-1)[place]

    @cached_property
    def operators(self) -> Operators:
        """Return the operators of the reference for these arguments."""
        return trace(self.subject.like, self.ideal, self.scales)


def _in_place(arguments: Sequence[Any], position: int, value: Tensor) -> list[Any]:
    return [*arguments[:position], value, *arguments[position + 1 :]]


@dataclass(frozen=True)
class ArithmeticFit:
    """A run of a kernel beside what an arithmetic gives."""

    case: Case
    arithmetic: Arithmetic
    least_flips: float = 0.0
    """The flip energy of a larger case."""
    emulated: Tensor | None = None
    """The values, where they are entries of those of another fit."""

    def of(self, case: Case) -> ArithmeticFit:
        """Hold another result of the same input at the values of this fit."""
        return replace(self, case=case, least_flips=self.flip_energy, emulated=self.values)

    @cached_property
    def values(self) -> Tensor:
        """Return what the arithmetic gives, before the last rounding."""
        return self._evaluated(self.case.ideal) if self.emulated is None else self.emulated

    @cached_property
    def outside(self) -> Tensor:
        """Return where float noise explains nothing, if no rounding inside falls otherwise."""
        return self._around(self._width).outside(self.case.actual)

    @cached_property
    def share(self) -> float:
        """Return the share of the values that float noise does not explain."""
        return float(self.outside.double().mean()) if self.outside.numel() else 0.0

    @cached_property
    def flip_energy(self) -> float:
        """Return the energy of what float noise does through the roundings inside, as a share."""
        if not self._rounds:
            return 0.0
        energy = 0.0
        runs = FLIP_RUNS if not self.least_flips else FURTHER_FLIP_RUNS
        for seed in range(runs):
            moved = (self.redrawn(seed) - self.values).nan_to_num_(0.0, 0.0, 0.0)
            energy += float(moved.square().sum())
        whole = float(self.values.nan_to_num(0.0, 0.0, 0.0).square().sum())
        return max(self.least_flips, energy / runs / whole if whole else 0.0)

    def redrawn(self, seed: int) -> Tensor:
        """Return the values as float noise of arguments and results inside may make them."""
        noise = Noise(seed)
        near = self.case.ideal
        if self.arithmetic.product is None:  # whose sums are definite, of definite codes
            near = [
                noise.inexact(x, SUMS) if isinstance(x, Tensor) and x.is_floating_point() else x
                for x in near
            ]
        return self._evaluated(near, noise)

    @cached_property
    def flips(self) -> Tensor:
        """Return the RMS effect of float noise on each value, through the roundings inside.

        What noise makes fall otherwise is rare, and few elements of few runs show it: the energy is
        spread over all elements, by that of their row and column.
        """
        squares = self.values.nan_to_num(0.0, 0.0, 0.0).square()
        energies = (smoothed(squares) - squares).clamp_min_(0.0)
        return (self.flip_energy * energies).sqrt_()

    @cached_property
    def widened(self) -> Expected:
        """Return the bounds with room for roundings that float noise makes fall otherwise."""
        return self._around(self.room)

    @property
    def room(self) -> Tensor:
        """Return the width of these bounds before results are quantized."""
        return self._width + FLIPS * self.flips

    @cached_property
    def settled(self) -> ArithmeticFit:
        """Return the fit with values next to ties of rounding on the side that the kernel took."""

        def excess(values: Tensor) -> Tensor:
            difference = self.case.actual.double() - values
            unexplained = replace(self, emulated=values).outside
            return difference.where(unexplained, 0.0).nan_to_num(0.0, 0.0, 0.0)

        ideal, unexplained = self.case.ideal, excess(self.values)
        for position, place, code in itertools.islice(self.case.near_codes(), MOST):
            other = ideal[position].clone(memory_format=torch.contiguous_format)
            other.view(-1)[place] = code
            changed = _in_place(ideal, position, other)
            changed_excess = excess(self._evaluated(changed))
            if float(changed_excess.norm()) < float(unexplained.norm()):
                ideal, unexplained = changed, changed_excess
            if not bool(unexplained.any()):
                break

        def moved(noise: Noise) -> Tensor:
            return self._evaluated(ideal, noise)

        fit = replace(self, emulated=settle(moved, excess, self.arithmetic.dtype, self._widths))
        vars(fit)["flip_energy"] = self.flip_energy  # noise does what it did before
        return fit

    @property
    def explaining(self) -> ArithmeticFit:
        """Return the fit that explains the result: this one, or with settled values."""
        if not bool(self.outside.any()) or (self._is_scattered and not self.is_exact):
            return self
        return self.settled

    @cached_property
    def is_right(self) -> bool:
        """Tell if the arithmetic explains the result."""
        if not bool(self.outside.any()):
            return True
        if self.is_exact:
            return not bool(self.settled.outside.any())
        # A code inside moves all values of its row: of one row alone that may be all of them.
        is_part = bool(self.case.subject.stages) and self.case.name != EXAMPLE
        if self.share > (1.0 if is_part else 0.5):
            return False
        if self.case.name == EXAMPLE and not self.changes_something:
            return False
        if self._is_scattered:
            return True
        limit = 0.5 if self.least_flips or self.case.subject.stages else UNSETTLED
        limit = 1.0 if is_part else limit  # of other runs one row may be much
        tries = self._settles and self.emulated is None and self.share <= limit
        return tries and self.settled._is_scattered

    @property
    def _is_scattered(self) -> bool:
        """Tell if values that differ are few, near and nowhere together."""
        outside = self.widened.outside(self.case.actual)
        count = int(outside.sum())
        if count > max(OTHERWISE * outside.numel(), 1):
            return False
        if count and bool(self._around(self._reach).outside(self.case.actual).any()):
            return False
        return not _concentrated(outside)

    @property
    def changes_something(self) -> bool:
        """Tell if values differ from exact ones: what changes no example explains nothing."""
        exact = self.case.exact
        return bool(((self.values - exact.values).abs() > exact.width).any())

    @property
    def is_exact(self) -> bool:
        """Tell if nothing is rounded but codes of what is quantized inside."""
        return not self._rounds and self.arithmetic.product is None

    @property
    def _settles(self) -> bool:
        """Tell if float noise may make a rounding or a code inside fall otherwise."""
        return self._rounds or bool(self.case.subject.stages)

    @cached_property
    def _widths(self) -> list[Tensor]:
        like = self.case.subject.like
        return noise_before_casts(like, self.case.ideal) if isinstance(like, StagedFunction) else []

    @property
    def _rounds(self) -> bool:
        rule = self.arithmetic.attention
        return bool(self.arithmetic.size) or rule is not None

    @property
    def _width(self) -> Tensor:
        if self.arithmetic.product is None or self.arithmetic.product.any_order:
            return self.case.exact.width
        return KNOWN_WIDTH * self.values.nan_to_num(0.0, 0.0, 0.0).abs()

    @property
    def _reach(self) -> Tensor:
        """Return how far values may be off whose roundings fell otherwise: two steps."""
        values = self.values.nan_to_num(0.0, 0.0, 0.0)
        typical = values.square().mean().sqrt()
        step = torch.finfo(self.arithmetic.dtype).eps
        return self.room + 2 * step * (values.abs() + typical)

    def _evaluated(self, ideal: Sequence[Any], noise: Noise | None = None) -> Tensor:
        like, scales = self.case.subject.like, self.case.scales
        return evaluate_as(like, ideal, self.arithmetic, noise, scales)

    def _around(self, room: Tensor) -> Expected:
        case = self.case
        return case.subject.around(Expected.around(self.values, room), case.choices, case.exact)


def _concentrated(outside: Tensor) -> bool:
    """Tell if values that differ gather in a row, a column or another entry of a dimension."""
    for dim in range(outside.dim()):
        if outside.shape[dim] < 2:
            continue
        counts = outside.movedim(dim, 0).reshape(outside.shape[dim], -1).sum(1)
        length = outside.numel() / outside.shape[dim]
        if bool((counts > max(FEW, CONCENTRATED * length)).any()):
            return True
    return False
