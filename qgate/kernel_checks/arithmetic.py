"""The arithmetic of a kernel whose result exact sums do not explain, found and held at all inputs.

A result is compared bit for bit with what the reference gives under an arithmetic. Values that
differ must lie within float noise, or within what float noise does to the roundings inside, and be
few and scattered: a rounding near a tie falls otherwise, a defect does not look like that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from qgate.expected.intermediates import (
    HALVES,
    INSIDE,
    PRODUCTS,
    SUMS,
    Arithmetic,
    AttentionRule,
    Noise,
    dtype_name,
    evaluate_as,
    toggled,
    trace,
)
from qgate.expected.noise import Expected, smoothed
from qgate.kernel_checks.runs import Failing, KernelRun
from qgate.kernel_checks.subject import Choices, KernelSubject

TILES = (64, 128, 32, 16, 96, 256, 512, 48, 80, 192)
"""Keys per step of fused attention that are tried, beside all keys at once."""
OTHERWISE = 0.01
"""Share of the values that float noise may round otherwise than expected."""
CONCENTRATED = 0.25
"""Share of the values of one row, column or head from which they are no accident."""
FEW = 3
"""Values of a row, column or head that may differ whatever its length."""
FLIPS = 8.0
"""Times the RMS effect that float noise has through the roundings inside."""
FLIP_RUNS = 4
MOST_SITES = 40
"""Operators up to which each is tried alone; of more, those of one name together."""
FAR = 4.0
"""Times the effect of rounding every operator's result from which on no rounding explains it."""


@dataclass(frozen=True)
class Fit:
    """A run of a kernel beside what an arithmetic gives."""

    subject: KernelSubject
    choices: Choices
    run: KernelRun
    exact: Expected
    arithmetic: Arithmetic
    count: int | None = None

    @cached_property
    def values(self) -> Tensor:
        """Return what the arithmetic gives, before the last rounding."""
        ideal = self.subject.ideal(self.run.arguments, self.choices)
        return evaluate_as(self.subject.like, ideal, self.arithmetic, self.count)

    @cached_property
    def expected(self) -> Expected:
        """Return the bounds that float noise explains if no rounding inside falls otherwise."""
        return self._around(self.exact.width)

    @cached_property
    def outside(self) -> Tensor:
        return self.expected.outside(self.run.actual)

    @property
    def share(self) -> float:
        """Return the share of the values that float noise does not explain."""
        return float(self.outside.double().mean()) if self.outside.numel() else 0.0

    @cached_property
    def flips(self) -> Tensor:
        """Return the RMS effect of float noise on each value, through the roundings inside."""
        ideal = self.subject.ideal(self.run.arguments, self.choices)
        squares = torch.zeros_like(self.values)
        for seed in range(FLIP_RUNS):
            noise = Noise(seed)
            near = [noise(x, SUMS) if isinstance(x, Tensor) and x.is_floating_point() else x for x in ideal]
            result = evaluate_as(self.subject.like, near, self.arithmetic, self.count, noise)
            squares += (result - self.values).nan_to_num_(0.0, 0.0, 0.0).square_()
        return (smoothed(squares / FLIP_RUNS) + _pooled(squares / FLIP_RUNS, self.values)).sqrt_()

    @cached_property
    def widened(self) -> Expected:
        """Return the bounds with room for roundings that float noise makes fall otherwise."""
        return self._around(self.exact.width + FLIPS * self.flips)

    @cached_property
    def is_right(self) -> bool:
        if not bool(self.outside.any()):
            return True
        if self.share > 0.5:
            return False
        outside = self.widened.outside(self.run.actual)
        count = int(outside.sum())
        if count > max(OTHERWISE * outside.numel(), 1):
            return False
        if count and bool(self._around(self._reach).outside(self.run.actual).any()):
            return False
        return not _concentrated(outside)

    @property
    def _reach(self) -> Tensor:
        """Return how far values may be off whose roundings fell otherwise: two steps."""
        values = self.values.nan_to_num(0.0, 0.0, 0.0)
        typical = values.square().mean().sqrt()
        step = torch.finfo(self.arithmetic.dtype).eps
        return self.exact.width + FLIPS * self.flips + 2 * step * (values.abs() + typical)

    def _around(self, room: Tensor) -> Expected:
        return self.subject.around(Expected.around(self.values, room), self.choices, self.exact)


def _pooled(squares: Tensor, values: Tensor) -> Tensor:
    """Spread mean squares over all rows, by the energy of each: what is rare is in few of them."""
    if not squares.numel() or not squares.dim():
        return squares
    energies = values.nan_to_num(0.0, 0.0, 0.0).square().mean(-1, keepdim=True)
    shares = squares.mean(-1, keepdim=True) / energies.clamp_min(torch.finfo(torch.float64).tiny)
    return shares.mean() * energies


def _concentrated(outside: Tensor) -> bool:
    """Tell if values that differ gather in a row, a column or another entry of a dimension."""
    for dim in range(outside.dim()):
        if outside.shape[dim] < 2:
            continue
        counts = outside.movedim(dim, 0).flatten(1).sum(1)
        length = outside.numel() / outside.shape[dim]
        if bool((counts > max(FEW, CONCENTRATED * length)).any()):
            return True
    return False


@dataclass(frozen=True)
class Accounted:
    """An arithmetic that explains all runs, and the fits that say so."""

    arithmetic: Arithmetic
    fits: dict[str, Fit]
    """By the name of the run, of those that exact arithmetic does not explain."""

    def expected(self, run: KernelRun, exact: Expected) -> Expected:
        """Return the bounds that a run was held at."""
        return self.fits[run.name].widened if run.name in self.fits else exact


def account(
    subject: KernelSubject, runs: Sequence[KernelRun], choices: Choices, failing: Sequence[Failing]
) -> Accounted | None:
    """Find the arithmetic that explains the runs that exact sums do not."""
    exact = {run.name: subject.expected(run.arguments, choices, ties=False) for run in runs}
    by_name = {run.name: run for run in runs}
    names = [run.name for run in runs if bool(exact[run.name].outside(run.actual).any())]
    first = by_name[failing[0].name]
    names = [first.name, *(name for name in names if name != first.name)]
    for arithmetic in _arithmetics(subject, first, choices, exact[first.name]):
        fits: dict[str, Fit] = {}
        for name in names:
            run = by_name[name]
            count = None
            if run is not first:
                count = len(trace(subject.like, subject.ideal(run.arguments, choices)).names)
            fit = Fit(subject, choices, run, exact[name], arithmetic, count)
            if not fit.is_right:
                if DEBUG:
                    print("   refuted", arithmetic.words(), name, fit.share)
                break
            fits[name] = fit
        else:
            return Accounted(arithmetic, fits)
    return None


import os
DEBUG = os.environ.get("DBG")


def _dtypes(subject: KernelSubject, run: KernelRun) -> list[torch.dtype]:
    """List the dtypes that intermediate values may have: that of the result, of arguments."""
    tensors = [run.actual, *(value for value in run.arguments if isinstance(value, Tensor))]
    return [dtype for dtype in dict.fromkeys(tensor.dtype for tensor in tensors) if dtype in HALVES]


def _arithmetics(
    subject: KernelSubject, run: KernelRun, choices: Choices, exact: Expected
) -> Iterator[Arithmetic]:
    """List arithmetics that explain one run, the likeliest first."""
    ideal = subject.ideal(run.arguments, choices)
    operators = trace(subject.like, ideal)
    names = tuple(operators.names)
    dequantized = tuple(subject.inputs)

    def fit_of(arithmetic: Arithmetic) -> Fit:
        return Fit(subject, choices, run, exact, arithmetic)

    for dtype in _dtypes(subject, run):
        eager = Arithmetic(dtype, None, dequantized, names=names)
        if _is_far(fit_of(eager)):
            if DEBUG: print("   far", dtype)
            continue
        fits = [fit_of(arithmetic) for arithmetic in _starts(eager, operators.has_attention)]
        yield from (fit.arithmetic for fit in fits if fit.is_right)
        fits.sort(key=lambda fit: (fit.share, fit.arithmetic.size))
        for start in fits[:2]:
            best = _searched(start)
            if best.is_right:
                yield best.arithmetic
            elif DEBUG:
                print("   searched", dtype, best.arithmetic.words(), best.share, start.share, start.arithmetic.words())


def _is_far(fit: Fit) -> bool:
    """Tell if a residual is larger than rounding everything makes it."""
    exact = fit.exact.values.nan_to_num(0.0, 0.0, 0.0)
    actual = fit.run.actual.double()
    if not bool(actual[fit.exact.values.isfinite()].isfinite().all()):
        return False
    residual = (actual - exact).nan_to_num(0.0, 0.0, 0.0)
    moves = (fit.values - exact).nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()
    last = torch.finfo(fit.arithmetic.dtype).eps * exact.square().mean().sqrt()
    return float(residual.square().mean().sqrt()) > FAR * float(moves + last)


def _starts(eager: Arithmetic, has_attention: bool) -> Iterator[Arithmetic]:
    """List what is common: nothing but arguments, products, everything; fused attention."""
    names = eager.names
    products = frozenset(
        site for site, name in enumerate(names) if name.split(INSIDE)[-1] in PRODUCTS
    )
    everything = frozenset(range(len(names)))
    plain = replace(eager, sites=frozenset())
    rules: list[AttentionRule | None] = [None]
    if has_attention:
        rules += [
            AttentionRule(eager.dtype, tile, ascending)
            for tile in (0, *TILES)
            for ascending in ((True, False) if tile else (True,))
        ]
        rules += [AttentionRule(eager.dtype, tile, is_coarse=True) for tile in (0, 512)]
    dequantized = [eager.arguments, ()] if eager.arguments else [()]
    for rule in rules:
        for arguments in dequantized:
            for sites in (frozenset(), products, None, everything):
                arithmetic = replace(plain, sites=sites, arguments=arguments, attention=rule)
                if sites is None or arithmetic.size or rule is not None:
                    yield arithmetic


def _searched(start: Fit) -> Fit:
    """Round one operator's result more or less at a time while that explains more values."""
    names = start.arithmetic.names
    groups = [[site] for site in range(len(names))]
    if len(names) > MOST_SITES:
        groups = [
            [site for site, other in enumerate(names) if other == name]
            for name in dict.fromkeys(names)
        ]
    best = start
    for _ in range(3):
        before = best
        for group in groups:
            changed = replace(best, arithmetic=toggled(best.arithmetic, group))
            if (changed.share, changed.arithmetic.size) < (best.share, best.arithmetic.size):
                best = changed
        if best is before or best.share == 0:
            break
    return best


def describe(accounted: Accounted) -> str:
    """Say how a kernel computes, for a report."""
    return accounted.arithmetic.words() or f"sums in {dtype_name(accounted.arithmetic.dtype)}"
