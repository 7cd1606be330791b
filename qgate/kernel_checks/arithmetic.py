"""The search for the arithmetic of a kernel whose results exact sums do not explain."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from qgate.arithmetics.float16_attention import PRODUCTS as OF_TILES
from qgate.arithmetics.float16_attention import RUNNING
from qgate.arithmetics.known import ATTENTIONS, PRODUCTS, KnownAttention, KnownProduct
from qgate.expected.intermediates import (
    CODES,
    HALVES,
    INSIDE,
    MULTIPLYING,
    Arithmetic,
    AttentionRule,
    eager_sites,
    toggled,
)
from qgate.expected.known_attention import KnownRule
from qgate.expected.noise import Expected
from qgate.expected.operators import Operators, stored_sites
from qgate.expected.stages import BEFORE_CAST, OPERATOR
from qgate.kernel_checks.fits import ArithmeticFit, Case
from qgate.kernel_checks.requests import KernelRequest
from qgate.kernel_checks.runs import Failing, KernelRun
from qgate.kernel_checks.subject import Choices, KernelSubject
from qgate.stats.bits import short_name

TILES = (64, 128, 32, 16, 96, 256, 512, 48, 80, 192)
"""Keys per step of fused attention that are tried, beside all keys at once."""
CLOSE = 0.005
"""Share of unexplained values up to which no other arithmetic is looked for."""
MOST_SITES = 40
"""Operators up to which each is tried alone; of more, those of one name together."""
FAR = 4.0
"""Times the effect of rounding every operator's result from which on no rounding explains it."""
NEAR = 0.1
"""Share of the values that float noise may leave unexplained before flips are looked at."""
SOFTMAX_GRADIENT = "_softmax_backward_data"
FIRST_SAMPLE = 16
"""Rows and columns on which most arithmetics are refuted."""


@dataclass(frozen=True)
class Accounted:
    """An arithmetic that explains all runs, and the fits that say so."""

    arithmetic: Arithmetic
    fits: dict[str, ArithmeticFit]
    """By the name of the run, of those that exact arithmetic does not explain."""

    def expected(self, run: KernelRun, exact: Expected) -> Expected:
        """Return the bounds that a run was held at."""
        fit = self.fits.get(run.name)
        return exact if fit is None or fit.values.shape != exact.values.shape else fit.widened

    @property
    def is_exact(self) -> bool:
        """Tell if nothing is rounded but codes of what is quantized inside."""
        return all(fit.is_exact for fit in self.fits.values())

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
        if self.is_exact:
            return "exact sums; codes inside at a boundary fall as float noise has them"
        return self.arithmetic.words() or f"sums in {short_name(self.arithmetic.dtype)}"

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
    nearly: list[Accounted] | None = None,
) -> Accounted | None:
    """Find the arithmetic that explains the runs that exact sums do not.

    nearly  gets those that explain the first of these runs, and not all
    """
    names = {case.name for case in failing}
    unexplained = [run for run in runs if run.name in names or request.asks]
    unexplained.sort(key=lambda run: bool(failing) and run.name != failing[0].name)
    cases: dict[str, Case] = {}
    for arithmetic in _arithmetics(Case.of(subject, choices, unexplained[0]), request):
        fits: dict[str, ArithmeticFit] = {}
        for run in unexplained:
            if run.name not in cases:
                cases[run.name] = Case.of(subject, choices, run)
            case = cases[run.name]
            largest = fits[unexplained[0].name].flip_energy if fits else 0.0
            values = None
            if fits and arithmetic.product is not None:  # whose sums of a row are its own
                values = case.part_of(fits[unexplained[0].name].values)
            fit = _best_split(ArithmeticFit(case, arithmetic, largest, values))
            if not fit.is_right:
                if fits and nearly is not None:
                    nearly.append(Accounted(arithmetic, fits))
                break
            fits[run.name] = fit.explaining
        else:
            return Accounted(arithmetic, fits)
    return None


def _best_split(fit: ArithmeticFit) -> ArithmeticFit:
    """Return the fit with as many parts of K as explain it: other shapes are cut otherwise."""
    product = fit.arithmetic.product
    if product is None or fit.is_right:
        return fit
    for parts in _splits(product, fit.case.operators):
        other = replace(fit, arithmetic=replace(fit.arithmetic, splits=parts), emulated=None)
        if other.is_right:
            return other
    return fit


def _splits(product: KnownProduct, operators: Operators) -> list[int]:
    depths = {depth for depth, dtypes in operators.depths if product.takes(*dtypes)}
    return [*dict.fromkeys(parts for depth in sorted(depths) for parts in product.splits(depth))]


def _arithmetics(case: Case, request: KernelRequest) -> Iterator[Arithmetic]:
    """List arithmetics that explain one run, the likeliest first."""
    operators = case.operators
    if case.subject.stages and not request.asks:  # codes inside that float noise decides
        dtype = case.actual.dtype if case.actual.dtype in HALVES else torch.float32
        yield Arithmetic(dtype, names=tuple(operators.names))
    yield from _known_gradients(case, operators, request)
    if request.intermediates and not isinstance(request.arithmetic, KnownProduct):
        yield from _roundings(case, operators, request)
    yield from _known_products(case, operators, request)


def _known_gradients(
    case: Case, operators: Operators, request: KernelRequest
) -> Iterator[Arithmetic]:
    """List known arithmetics of gradients of attention: they round what no operator returns."""
    is_gradient = operators.has_fused_attention and SOFTMAX_GRADIENT in operators.names
    if not is_gradient or not request.intermediates or isinstance(request.arithmetic, KnownProduct):
        return
    names = tuple(operators.names)
    for attention in ATTENTIONS.values() if request.arithmetic is None else [request.arithmetic]:
        for dtype in case.halves:
            if dtype not in attention.dtypes or not attention.has_gradients:
                continue
            # Tiles matter for the sums of probabilities alone.
            for tile, descending in attention.tilings(operators.keys)[:2]:
                rule = KnownRule(attention, dtype, tile % operators.keys, descending)
                fit = ArithmeticFit(case, Arithmetic(dtype, attention=rule, names=names))
                if fit.share < NEAR and fit.is_right:
                    yield fit.arithmetic


def _known_products(
    case: Case, operators: Operators, request: KernelRequest
) -> Iterator[Arithmetic]:
    """List known arithmetics of products, with and without eager roundings between operators."""
    if isinstance(request.arithmetic, KnownAttention):
        return
    dtype = case.actual.dtype if case.actual.dtype in HALVES else torch.bfloat16
    names = tuple(operators.names)
    roundings = [frozenset[int]()]
    if case.actual.dtype in HALVES and len(names) > 1 and request.intermediates:
        roundings.append(eager_sites(names))
    sample = case if case.subject.output else case.sampled(FIRST_SAMPLE)
    candidates = (
        PRODUCTS if request.arithmetic is None else {request.arithmetic.name: request.arithmetic}
    )
    # Where there are no tensor cores, operands that are rounded were cast to fewer bits.
    in_any_order = case.actual.is_cuda or request.asks
    splits = {
        name: _splits(PRODUCTS[name], operators)
        for name in candidates
        if (request.intermediates or not PRODUCTS[name].rounds_parts)
        and (in_any_order or not PRODUCTS[name].any_order)
    }
    # The likeliest cut of K in each arithmetic first.
    pairs = [(name, parts) for name in splits for parts in splits[name][:1]]
    pairs += [(name, parts) for name in splits for parts in splits[name][1:]]
    for sites, (name, parts) in itertools.product(roundings, pairs):
        product = PRODUCTS[name]
        arithmetic = Arithmetic(dtype, sites, product=product, splits=parts, names=names)
        if ArithmeticFit(sample, arithmetic).is_right and ArithmeticFit(case, arithmetic).is_right:
            yield arithmetic


def _roundings(case: Case, operators: Operators, request: KernelRequest) -> Iterator[Arithmetic]:
    names = tuple(operators.names)
    for dtype in case.halves:
        eager = Arithmetic(dtype, eager_sites(names), tuple(case.subject.inputs), names=names)
        if _is_far(ArithmeticFit(case, eager)):
            continue
        yield from _best_first(case, eager, operators, request)


def _best_first(
    case: Case, eager: Arithmetic, operators: Operators, request: KernelRequest
) -> Iterator[Arithmetic]:
    """List roundings that explain one run, those first that leave the fewest values unexplained."""
    fits = [ArithmeticFit(case, replace(eager, sites=frozenset(), arguments=()))]
    for rules in _rules(eager.dtype, operators, request):
        plain = [
            ArithmeticFit(
                case, replace(eager, sites=frozenset(), arguments=arguments, attention=rule)
            )
            for rule in rules
            for arguments in dict.fromkeys((eager.arguments, ()))
        ]
        plain.sort(key=lambda fit: fit.share)
        for start in plain[:2]:
            rule, arguments = start.arithmetic.attention, start.arithmetic.arguments
            chosen = replace(eager, arguments=arguments, attention=rule)
            for arithmetic in _starts(case, chosen):
                fits.append(ArithmeticFit(case, arithmetic))
                if fits[-1].share <= CLOSE and fits[-1].is_right:
                    yield arithmetic
    fits.sort(key=lambda fit: (fit.share, fit.arithmetic.size))
    listed = [_searched(start) for start in fits[:2]] + fits
    listed.sort(key=lambda fit: (fit.share, fit.arithmetic.size))
    for fit in listed:
        rounds = fit.arithmetic.size or fit.arithmetic.attention is not None
        if rounds and fit.is_right:
            yield fit.arithmetic


def _is_far(fit: ArithmeticFit) -> bool:
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
    stored = stored_sites(case.subject.like, case.ideal, eager.names, eager.dtype)
    site_sets = [
        frozenset[int](),
        stored,
        frozenset(site for site in everything if last[site] in MULTIPLYING),
        frozenset(site for site in everything if last[site] == CODES),
        eager.sites | (everything - frozenset(range(len(last) - 1))),
        everything,
    ]
    if OPERATOR in last:
        before_casts = frozenset(n for n in everything if eager.names[n] == BEFORE_CAST)
        codes = frozenset(site for site in everything if last[site] == OPERATOR)
        site_sets[1:1] = [before_casts, before_casts | site_sets[1], eager.sites | codes]
    for sites in dict.fromkeys(site_sets):
        arithmetic = replace(eager, sites=sites)
        if arithmetic.size or eager.attention is not None:
            yield arithmetic


def _rules(
    dtype: torch.dtype, operators: Operators, request: KernelRequest
) -> Iterator[Sequence[AttentionRule | KnownRule | None]]:
    """List rules of attention, the likeliest set first: that of a device if one was named."""
    keys = operators.keys
    if isinstance(request.arithmetic, KnownAttention):
        if operators.has_fused_attention and dtype in request.arithmetic.dtypes:
            tilings = request.arithmetic.tilings(keys)
            yield [
                KnownRule(request.arithmetic, dtype, tile % keys, last) for tile, last in tilings
            ]
        return
    yield [None]
    if operators.has_attention:
        lanes = [(tile, width) for tile in (0, 512) if tile < keys for width in (16, 8, 32)]
        tiles = [0, *(tile for tile in TILES if tile < keys)]
        yield [AttentionRule(dtype, tile, lanes=width) for tile, width in lanes]
        yield [AttentionRule(dtype, tile) for tile in tiles]
        yield [AttentionRule(dtype, tile, ascending=False) for tile in tiles[1:]]
        if dtype is torch.float16:
            for sums in (OF_TILES, RUNNING):
                yield [AttentionRule(dtype, tile, sums=sums) for tile in tiles]


def _searched(start: ArithmeticFit) -> ArithmeticFit:
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
