"""The arithmetic of a kernel whose result exact sums do not explain, found and held at all inputs.

A result is compared bit for bit with what the reference gives under an arithmetic. Values that
differ must lie within float noise, or within what float noise does to the roundings inside, and be
few and scattered: a rounding near a tie falls otherwise, a defect does not look like that.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qgate.arithmetics.attention import NormalizedAttention
from qgate.arithmetics.known import ATTENTIONS, PRODUCTS, KnownAttention, KnownProduct
from qgate.expected.derived import are_independent, find_axes
from qgate.expected.intermediates import (
    CODES,
    HALVES,
    INSIDE,
    MULTIPLYING,
    SUMS,
    Arithmetic,
    AttentionRule,
    Noise,
    Operators,
    dtype_name,
    eager_sites,
    evaluate_as,
    toggled,
    trace,
)
from qgate.expected.known_attention import KnownRule
from qgate.expected.noise import Expected, evaluate, smoothed
from qgate.kernel_checks.requests import KernelRequest
from qgate.kernel_checks.runs import Failing, KernelRun
from qgate.kernel_checks.subject import Choices, KernelSubject

DEBUG = os.environ.get("DBG")
TILES = (64, 128, 32, 16, 96, 256, 512, 48, 80, 192)
"""Keys per step of fused attention that are tried, beside all keys at once."""
OTHERWISE = 0.01
"""Share of the values that float noise may round otherwise than expected."""
CLOSE = 0.005
"""Share of unexplained values up to which no other arithmetic is looked for."""
CONCENTRATED = 0.25
"""Share of the values of one row, column or head from which they are no accident."""
FEW = 3
"""Values of a row, column or head that may differ whatever its length."""
FLIPS = 8.0
"""Times the RMS effect that float noise has through the roundings inside."""
FLIP_RUNS = 4
KNOWN_WIDTH = 2.0**-21
"""Relative room of a known arithmetic, whose sums are definite: scales may be multiplied before."""
MOST_SITES = 40
"""Operators up to which each is tried alone; of more, those of one name together."""
FAR = 4.0
"""Times the effect of rounding every operator's result from which on no rounding explains it."""
NEAR = 0.1
"""Share of the values that float noise may leave unexplained before flips are looked at."""
SOFTMAX_GRADIENT = "_softmax_backward_data"
FIRST_SAMPLE = 16
"""Rows and columns on which most arithmetics are refuted."""
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

    @classmethod
    def of(cls, subject: KernelSubject, choices: Choices, run: KernelRun) -> Case:
        """Return the case of a run; of a large result, of some of its rows and columns."""
        exact = subject.expected(run.arguments, choices, ties=False)
        ideal, scales = (
            subject.ideal(run.arguments, choices),
            subject.scales(run.arguments, choices),
        )
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

    @cached_property
    def operators(self) -> Operators:
        """Return the operators of the reference for these arguments."""
        return trace(self.subject.like, self.ideal, self.scales)


def _in_place(arguments: Sequence[Any], position: int, value: Tensor) -> list[Any]:
    return [*arguments[:position], value, *arguments[position + 1 :]]


@dataclass(frozen=True)
class Fit:
    """A run of a kernel beside what an arithmetic gives."""

    case: Case
    arithmetic: Arithmetic
    count: int | None = None
    least_flips: float = 0.0
    """The flip energy of a larger case."""
    given: Tensor | None = None
    """The values, where they are entries of those of another fit."""

    @cached_property
    def values(self) -> Tensor:
        """Return what the arithmetic gives, before the last rounding."""
        return self._evaluated(self.case.ideal) if self.given is None else self.given

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
        for seed in range(FLIP_RUNS):
            noise = Noise(seed)
            near = self.case.ideal
            if self.arithmetic.product is None:  # whose sums are definite, of definite codes
                near = [
                    noise(x, SUMS) if isinstance(x, Tensor) and x.is_floating_point() else x
                    for x in near
                ]
            moved = (self._evaluated(near, noise) - self.values).nan_to_num_(0.0, 0.0, 0.0)
            energy += float(moved.square().sum())
        whole = float(self.values.nan_to_num(0.0, 0.0, 0.0).square().sum())
        return max(self.least_flips, energy / FLIP_RUNS / whole if whole else 0.0)

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
        return self._around(self._width + FLIPS * self.flips)

    @cached_property
    def is_right(self) -> bool:
        """Tell if the arithmetic explains the result."""
        if not bool(self.outside.any()):
            return True
        if self.share > 0.5 or not self.changes_something:
            return False
        outside = self.widened.outside(self.case.actual)
        count = int(outside.sum())
        if count > max(OTHERWISE * outside.numel(), 1):
            return False
        if count and bool(self._around(self._reach).outside(self.case.actual).any()):
            return False
        return not _concentrated(outside)

    @property
    def changes_something(self) -> bool:
        """Tell if values differ from exact ones: what changes nothing explains nothing."""
        exact = self.case.exact
        return bool(((self.values - exact.values).abs() > exact.width).any())

    @property
    def _rounds(self) -> bool:
        rule = self.arithmetic.attention
        return bool(self.arithmetic.size) or rule is not None

    @property
    def _width(self) -> Tensor:
        if self.arithmetic.product is None:
            return self.case.exact.width
        return KNOWN_WIDTH * self.values.nan_to_num(0.0, 0.0, 0.0).abs()

    @property
    def _reach(self) -> Tensor:
        """Return how far values may be off whose roundings fell otherwise: two steps."""
        values = self.values.nan_to_num(0.0, 0.0, 0.0)
        typical = values.square().mean().sqrt()
        step = torch.finfo(self.arithmetic.dtype).eps
        return self._width + FLIPS * self.flips + 2 * step * (values.abs() + typical)

    def _evaluated(self, ideal: Sequence[Any], noise: Noise | None = None) -> Tensor:
        like, scales = self.case.subject.like, self.case.scales
        return evaluate_as(like, ideal, self.arithmetic, self.count, noise, scales)

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


@dataclass(frozen=True)
class Accounted:
    """An arithmetic that explains all runs, and the fits that say so."""

    arithmetic: Arithmetic
    fits: dict[str, Fit]
    """By the name of the run, of those that exact arithmetic does not explain."""

    def expected(self, run: KernelRun, exact: Expected) -> Expected:
        """Return the bounds that a run was held at."""
        fit = self.fits.get(run.name)
        return exact if fit is None or fit.values.shape != exact.values.shape else fit.widened

    @cached_property
    def cost(self) -> float:
        """Return the RMS distance from exact sums, relative to their RMS."""
        fit = next(iter(self.fits.values()))
        exact = fit.case.exact.values.nan_to_num(0.0, 0.0, 0.0)
        difference = (fit.values - exact).nan_to_num(0.0, 0.0, 0.0)
        return float(difference.norm() / exact.norm().clamp_min(torch.finfo(torch.float64).tiny))

    @cached_property
    def shift(self) -> float:
        """Return by how much results are too large, as a share of the exact ones."""
        fit = next(iter(self.fits.values()))
        exact = fit.case.exact.values.nan_to_num(0.0, 0.0, 0.0)
        size = exact.abs().sum().clamp_min(torch.finfo(torch.float64).tiny)
        outward = fit.values.nan_to_num(0.0, 0.0, 0.0) * exact.sign()
        return float(outward.sum() / size) - 1

    def words(self) -> str:
        """Say how a kernel computes, for a report."""
        return self.arithmetic.words() or f"sums in {dtype_name(self.arithmetic.dtype)}"

    def cost_words(self) -> str:
        """Say what that costs against exact sums that are rounded once."""
        if abs(self.shift) > self.cost / 2:
            way = "large" if self.shift > 0 else "small"
            cost = f"results are {_percent(abs(self.shift))} too {way} on these inputs"
        else:
            cost = f"errors of {_percent(self.cost)} of the RMS on these inputs"
        return f"{self.words()}: {cost}, against exact sums"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def account(
    subject: KernelSubject,
    runs: Sequence[KernelRun],
    choices: Choices,
    failing: Sequence[Failing],
    request: KernelRequest,
) -> Accounted | None:
    """Find the arithmetic that explains the runs that exact sums do not."""
    names = {case.name for case in failing}
    asked = [run for run in runs if run.name in names or request.asks]
    asked.sort(key=lambda run: bool(failing) and run.name != failing[0].name)
    cases: dict[str, Case] = {}
    for arithmetic in _arithmetics(Case.of(subject, choices, asked[0]), request):
        fits: dict[str, Fit] = {}
        for run in asked:
            if run.name not in cases:
                cases[run.name] = Case.of(subject, choices, run)
            case = cases[run.name]
            rounds_some = arithmetic.sites and run is not asked[0]
            count = len(case.operators.names) if rounds_some else None
            largest = fits[asked[0].name].flip_energy if fits else 0.0
            given = None
            if fits and arithmetic.product is not None:  # whose sums of a row are its own
                given = case.part_of(fits[asked[0].name].values)
            fit = _best_split(Fit(case, arithmetic, count, largest, given))
            if not fit.is_right:
                break
            fits[run.name] = fit
        else:
            return Accounted(arithmetic, fits)
    return None


def _best_split(fit: Fit) -> Fit:
    """Return the fit with as many parts of K as explain it: other shapes are cut otherwise."""
    product = fit.arithmetic.product
    if product is None or fit.is_right:
        return fit
    for parts in _splits(product, fit.case.operators):
        other = replace(fit, arithmetic=replace(fit.arithmetic, splits=parts), given=None)
        if other.is_right:
            return other
    return fit


def _splits(product: KnownProduct, operators: Operators) -> list[int]:
    depths = {depth for depth, dtypes in operators.depths if product.takes(*dtypes)}
    return [*dict.fromkeys(parts for depth in sorted(depths) for parts in product.splits(depth))]


def _arithmetics(case: Case, request: KernelRequest) -> Iterator[Arithmetic]:
    """List arithmetics that explain one run, the likeliest first."""
    operators = case.operators
    yield from _known_gradients(case, operators, request)
    if request.intermediates and not isinstance(request.known, KnownProduct):
        yield from _roundings(case, operators, request)
    yield from _known_products(case, operators, request)


def _known_gradients(
    case: Case, operators: Operators, request: KernelRequest
) -> Iterator[Arithmetic]:
    """List known arithmetics of gradients of attention: they round what no operator returns."""
    is_gradient = operators.has_fused_attention and SOFTMAX_GRADIENT in operators.names
    if not is_gradient or not request.intermediates or isinstance(request.known, KnownProduct):
        return
    names = tuple(operators.names)
    for known in ATTENTIONS.values() if request.known is None else [request.known]:
        for dtype in case.halves:
            if dtype not in known.dtypes or isinstance(known, NormalizedAttention):
                continue
            # Tiles matter for the sums of probabilities alone.
            for tile, descending in known.tilings(operators.keys)[:2]:
                rule = KnownRule(known, dtype, tile % operators.keys, descending)
                fit = Fit(case, Arithmetic(dtype, attention=rule, names=names))
                if fit.share < NEAR and fit.is_right:
                    yield fit.arithmetic


def _known_products(
    case: Case, operators: Operators, request: KernelRequest
) -> Iterator[Arithmetic]:
    """List known arithmetics of products, with and without eager roundings between operators."""
    if isinstance(request.known, KnownAttention):
        return
    dtype = case.actual.dtype if case.actual.dtype in HALVES else torch.bfloat16
    names = tuple(operators.names)
    roundings = [frozenset[int]()]
    if case.actual.dtype in HALVES and len(names) > 1 and request.intermediates:
        roundings.append(eager_sites(names))
    sample = case if case.subject.output else case.sampled(FIRST_SAMPLE)
    asked = PRODUCTS if request.known is None else {request.known.name: request.known}
    splits = {name: _splits(PRODUCTS[name], operators) for name in asked}
    # The likeliest cut of K in each arithmetic first.
    pairs = [(name, parts) for name in splits for parts in splits[name][:1]]
    pairs += [(name, parts) for name in splits for parts in splits[name][1:]]
    for sites, (name, parts) in itertools.product(roundings, pairs):
        product = PRODUCTS[name]
        arithmetic = Arithmetic(dtype, sites, product=product, splits=parts, names=names)
        if Fit(sample, arithmetic).is_right and Fit(case, arithmetic).is_right:
            yield arithmetic


def _roundings(case: Case, operators: Operators, request: KernelRequest) -> Iterator[Arithmetic]:
    names = tuple(operators.names)
    for dtype in case.halves:
        eager = Arithmetic(dtype, eager_sites(names), tuple(case.subject.inputs), names=names)
        if _is_far(Fit(case, eager)):
            continue
        yield from _best_first(case, eager, operators, request)


def _best_first(
    case: Case, eager: Arithmetic, operators: Operators, request: KernelRequest
) -> Iterator[Arithmetic]:
    """List roundings that explain one run, those first that leave the fewest values unexplained."""
    fits = [Fit(case, replace(eager, sites=frozenset(), arguments=()))]
    for rules in _rules(eager.dtype, operators, request):
        plain = [
            Fit(case, replace(eager, sites=frozenset(), arguments=arguments, attention=rule))
            for rule in rules
            for arguments in dict.fromkeys((eager.arguments, ()))
        ]
        plain.sort(key=lambda fit: fit.share)
        for start in plain[:2]:
            rule, arguments = start.arithmetic.attention, start.arithmetic.arguments
            chosen = replace(eager, arguments=arguments, attention=rule)
            for arithmetic in _starts(case, chosen):
                fits.append(Fit(case, arithmetic))
                if fits[-1].share <= CLOSE and fits[-1].is_right:
                    yield arithmetic
    fits.sort(key=lambda fit: (fit.share, fit.arithmetic.size))
    listed = [_searched(start) for start in fits[:2]] + fits
    listed.sort(key=lambda fit: (fit.share, fit.arithmetic.size))
    for fit in listed:
        rounds = fit.arithmetic.size or fit.arithmetic.attention is not None
        if rounds and fit.is_right:
            yield fit.arithmetic


def _is_far(fit: Fit) -> bool:
    """Tell if a residual is larger than rounding everything makes it."""
    exact = fit.case.exact.values.nan_to_num(0.0, 0.0, 0.0)
    actual = fit.case.actual.double()
    if not bool(actual[fit.case.exact.values.isfinite()].isfinite().all()):
        return False
    residual = (actual - exact).nan_to_num(0.0, 0.0, 0.0)
    moves = (fit.values - exact).nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()
    last = torch.finfo(fit.arithmetic.dtype).eps * exact.square().mean().sqrt()
    return float(residual.square().mean().sqrt()) > FAR * float(moves + last)


def _starts(case: Case, eager: Arithmetic) -> Iterator[Arithmetic]:
    """List what is common: nothing but arguments, products, everything."""
    last = [name.split(INSIDE)[-1] for name in eager.names]
    # The result is rounded to its dtype anyway.
    rounded_last = eager.dtype != case.actual.dtype or case.subject.output is not None
    count = len(last) if rounded_last else len(last) - 1
    everything = frozenset(range(count))
    site_sets = [
        frozenset[int](),
        frozenset(site for site in everything if last[site] in MULTIPLYING),
        frozenset(site for site in everything if last[site] == CODES),
        eager.sites | (everything - frozenset(range(len(last) - 1))),
        everything,
    ]
    for sites in dict.fromkeys(site_sets):
        arithmetic = replace(eager, sites=sites)
        if arithmetic.size or eager.attention is not None:
            yield arithmetic


def _rules(
    dtype: torch.dtype, operators: Operators, request: KernelRequest
) -> Iterator[Sequence[AttentionRule | KnownRule | None]]:
    """List rules of attention, the likeliest set first: that of a device if one was named."""
    keys = operators.keys
    if isinstance(request.known, KnownAttention):
        if operators.has_fused_attention and dtype in request.known.dtypes:
            tilings = request.known.tilings(keys)
            yield [KnownRule(request.known, dtype, tile % keys, last) for tile, last in tilings]
        return
    yield [None]
    if operators.has_attention:
        lanes = [(tile, width) for tile in (0, 512) if tile < keys for width in (16, 8)]
        tiles = [0, *(tile for tile in TILES if tile < keys)]
        yield [AttentionRule(dtype, tile, lanes=width) for tile, width in lanes]
        yield [AttentionRule(dtype, tile) for tile in tiles]
        yield [AttentionRule(dtype, tile, ascending=False) for tile in tiles[1:]]


def _searched(start: Fit) -> Fit:
    """Round one operator's result more or less at a time while that explains more values."""
    names = start.arithmetic.names
    groups = [[site] for site in range(len(names))]
    if len(names) > MOST_SITES:
        groups = [
            [site for site, other in enumerate(names) if other == name]
            for name in dict.fromkeys(names)
        ]
    if start.case.actual.dtype == start.arithmetic.dtype and not start.case.subject.output:
        groups = [group for group in groups if group != [len(names) - 1]]
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
