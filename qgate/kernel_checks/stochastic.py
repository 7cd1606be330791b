"""Rounding at random: each value is one of its two neighbors, and right on average.

A kernel that declares it runs with several seeds. Where it quantizes its result, each value must be
a neighbor of the exact one. The mean over all seeds must be the exact result within the noise of
such a mean: everywhere, along each row and column, and for each share of the way between neighbors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qgate.causes.outputs import describe_places, scattered
from qgate.causes.places import axis_word, factor_words
from qgate.causes.terms import TermFault
from qgate.expected.derived import find_axes
from qgate.expected.narrow_floats import same_bits
from qgate.expected.noise import Expected
from qgate.expected.products import find_product
from qgate.formats import Quantizer
from qgate.formats.encoded import encode_tensor
from qgate.formats.options import Floats
from qgate.formats.settings import QuantizerSettings
from qgate.kernel_checks.declared import element_scales
from qgate.kernel_checks.record import CheckFailure, CheckReport
from qgate.kernel_checks.references import with_seed
from qgate.kernel_checks.subject import RESULT, KernelSubject

DRAWS = 64
"""Seeds that a kernel runs with."""
SURE = 6.0
"""Times the noise of a mean from which it is a bias: of 10^8 means of noise one is above."""
BERNSTEIN = SURE * SURE * (1 / 3)
"""Times the largest step of one draw by which rare draws move a sum: Bernstein's bound."""
SHARES = 8
"""Parts of the way from one neighbor to the other whose values are held together."""
WHOLE = 0.2
"""Room around the weight of a term that is lost or counted twice: a mean has noise."""
FEWEST, FROZEN = 8, 0.25
"""Values of a row that tell how much it varies; the share of its variance that is too little."""
SMALLEST = 1e-300
STEP = 2.0**-21
"""Relative error of a code times its scale in float32, and of the source's own rounding."""


@dataclass(frozen=True)
class Neighbors:
    """The values of a format beside exact ones.

    share  how far each exact value is from the neighbor below, in steps
    """

    exact: Tensor
    below: Tensor
    above: Tensor
    share: Tensor

    @classmethod
    def of(cls, exact: Tensor, quantizer: QuantizerSettings) -> Neighbors:
        """Find the neighbors; beyond the largest value both are that one."""
        options = {**quantizer.options, "rounding": "zero"}
        options.pop("generator", None)
        encoded = encode_tensor(exact.float(), QuantizerSettings(quantizer.format, options), "zero")
        scales = element_scales(encoded).to(exact.device)
        inner = encoded.decode(torch.float64)
        if quantizer.format.element.is_codebook:
            return cls._of_levels(exact, quantizer.format.element.sorted_values, scales)
        magnitudes = torch.from_numpy(quantizer.format.element.magnitudes()).to(exact.device)
        ratios = (inner.abs() / scales).nan_to_num(0.0, 0.0, 0.0).contiguous()
        places = torch.searchsorted(magnitudes, ratios * (1 - STEP))
        following = magnitudes[(places + 1).clamp(max=len(magnitudes) - 1)] * scales
        outer = torch.where(exact.abs() > inner.abs() * (1 + STEP), following, inner.abs())
        sides = torch.stack([inner, outer.copysign(exact)])
        below, above = sides.amin(0), sides.amax(0)
        share = (exact - below) / torch.where(above > below, above - below, 1.0)
        return cls(exact, below, above, share.clamp(0.0, 1.0))

    @classmethod
    def _of_levels(cls, exact: Tensor, levels: Floats, scales: Tensor) -> Neighbors:
        """Find the neighbors among levels, which are not the same of either sign."""
        values = torch.from_numpy(levels).to(exact.device)
        ratios = (exact / scales).nan_to_num(0.0, 0.0, 0.0).contiguous()
        last = (torch.searchsorted(values, ratios, right=True) - 1).clamp(0, len(values) - 2)
        below, above = values[last] * scales, values[last + 1] * scales
        share = (exact - below) / torch.where(above > below, above - below, 1.0)
        return cls(exact, below, above, share.clamp(0.0, 1.0))

    def rounded(self, dtype: torch.dtype) -> Neighbors:
        """Return the neighbors as a dtype holds them; the share of the way stays."""
        below, above = (side.to(dtype).double() for side in (self.below, self.above))
        return Neighbors(self.exact, below, above, self.share)

    @property
    def mean(self) -> Tensor:
        return self.below + self.share * (self.above - self.below)

    @property
    def variance(self) -> Tensor:
        return (self.above - self.below).square() * self.share * (1 - self.share)

    def drawn(self, generator: torch.Generator) -> Tensor:
        """Return one of both neighbors of each value, above as often as its share says."""
        chances = torch.rand(self.share.shape, generator=generator).to(self.share.device)
        return torch.where(chances < self.share, self.above, self.below)

    def wrong(self, values: Tensor, noise: Tensor) -> Tensor:
        """Return where a value is neither of the two neighbors."""
        room = STEP * values.abs() + noise
        is_near = (values - self.below).abs() <= room
        return ~(is_near | ((values - self.above).abs() <= room))


@dataclass(frozen=True)
class _Mean:
    """The mean over all seeds: its difference from the exact result, and the noise of that.

    jump  how far one draw of a value may move the mean
    """

    bias: Tensor
    variance: Tensor
    jump: Tensor
    exact: Tensor

    def where(self, inside: Tensor) -> _Mean:
        return _Mean(*(side[inside] for side in self._sides))

    def times_exact(self) -> _Mean:
        """Weigh each value by the exact one, so that a factor on all of them adds up."""
        bias, variance, jump, exact = self._sides
        return _Mean(bias * exact, variance * exact.square(), jump * exact.abs(), exact)

    def lines(self, words: str) -> Iterator[tuple[str, _Mean]]:
        """Take each row, column and other entry alone, with its name."""
        count = self.bias.dim()
        for dim in range(count) if count > 1 else ():
            for index in range(self.bias.shape[dim]):
                named = words.format(f"{axis_word(count, dim)} {index}")
                yield named, _Mean(*(side.select(dim, index) for side in self._sides))

    def ratio(self) -> float:
        """Return the sum of all differences in units of its noise, beyond what rare draws do."""
        if not self.bias.numel():
            return 0.0
        total, noise = float(self.bias.sum()), math.sqrt(float(self.variance.sum()))
        noise = max(noise, STEP * float(self.exact.abs().mean()), SMALLEST)
        beyond = abs(total) - BERNSTEIN * float(self.jump.max())
        return math.copysign(max(beyond, 0.0) / noise, total)

    @property
    def _sides(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.bias, self.variance, self.jump, self.exact


def is_stochastic(declared: Any) -> bool:
    return isinstance(declared, QuantizerSettings) and declared.rounding == "stochastic"


def nearest_twin(declared: Any) -> Any:
    """Return a declared quantizer with rounding to the nearest in place of rounding at random."""
    if not is_stochastic(declared):
        return declared
    options = {k: v for k, v in declared.options.items() if k not in ("rounding", "generator")}
    return Quantizer(declared.format, **options)


def of_effect(
    subject: KernelSubject, example: list[Any], declared: dict[Any, QuantizerSettings]
) -> dict[Any, QuantizerSettings]:
    """Return those that are rounded at random and change the reference's result.

    The gradient of one argument of a product does not depend on the codes of that argument.
    """
    ideal = subject.ideal(example, dict.fromkeys(subject.slots, 0))
    chosen = {}
    for slot, quantizer in declared.items():
        if slot != RESULT:
            beside = Neighbors.of(example[slot].double(), quantizer)
            sides = (
                subject.unquantized([*ideal[:slot], values, *ideal[slot + 1 :]])
                for values in (beside.below, beside.above)
            )
            if same_bits(*sides):
                continue
        chosen[slot] = quantizer
    return chosen


def check_stochastic(
    subject: KernelSubject,
    example: list[Any],
    declared: dict[Any, QuantizerSettings],
    seed: int,
    report: CheckReport,
) -> None:
    """Hold the results of several seeds at the exact result; `declared` is rounded at random.

    The subject has rounding to the nearest in their place.
    """
    draws = [_drawn(subject, example, seed + number) for number in range(DRAWS)]
    if not same_bits(draws[0], _drawn(subject, example, seed)):
        raise CheckFailure(
            f"{report.name} gives other bits in a second call with the same seed", report,
            "torch.manual_seed sets it; a kernel with a seed of its own gets "
            "torch.initial_seed()",
        )  # fmt: skip
    values = torch.stack(draws).double()
    choices = dict.fromkeys(subject.slots, 0)
    ideal = subject.ideal(example, choices)
    if [*declared] == [RESULT]:
        without = replace(subject, output=None)
        expected = without.expected(example, choices)
        neighbors = Neighbors.of(expected.values, declared[RESULT]).rounded(draws[0].dtype)
        _hold_neighbors(values, neighbors, expected, report)
        target, variance, share = neighbors.mean, neighbors.variance, neighbors.share
        jump = neighbors.above - neighbors.below
    else:
        target, variance = _drawn_reference(subject, example, choices, declared, seed)
        share, jump = None, variance.sqrt()
    bias = values.mean(0) - target
    mean = _Mean(bias, variance / DRAWS, jump / DRAWS, target)
    # Values that are pushed one way vary less, too: the bias says more.
    _hold_randomness(draws, values, variance, report, is_biased=abs(mean.ratio()) > SURE)
    _hold_terms(subject, ideal, bias, report)
    _hold_means(mean, share, report)
    _hold_factors(mean, report)
    report.conventions |= {
        "result" if slot == RESULT else f"argument {slot}": "rounded at random, right on average"
        for slot in declared
    }
    report.held.append(f"the example with {DRAWS} seeds")
    rms = float(target.square().mean().sqrt())
    total = float(variance.mean().sqrt()) / math.sqrt(DRAWS * variance.numel())
    report.smallest_defect["a bias of all values, of the RMS"] = SURE * total / rms
    report.left_out["derived inputs"] = "rounding at random is held at the example alone"


def _drawn(subject: KernelSubject, example: list[Any], seed: int) -> Tensor:
    return with_seed(lambda: subject.run(example, f"seed {seed}"), example, seed)


def _drawn_reference(
    subject: KernelSubject,
    example: list[Any],
    choices: dict[Any, int],
    declared: dict[Any, QuantizerSettings],
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of the reference over arguments rounded at random.

    The mean of products is that of the exact arguments; of other functions it is drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    ideal = subject.ideal(example, choices)
    neighbors = {
        position: Neighbors.of(example[position].double(), quantizer)
        for position, quantizer in declared.items()
        if position != RESULT
    }
    results = []
    for _ in range(4 * DRAWS):
        for position, beside in neighbors.items():
            ideal[position] = beside.drawn(generator)
        result = subject.unquantized(ideal)
        if RESULT in declared:
            result = Neighbors.of(result, declared[RESULT]).drawn(generator)
        results.append(result)
    stacked = torch.stack(results)
    # The mean of the reference is drawn too, from four times as many results.
    return stacked.mean(0), stacked.var(0) * 1.25


def _hold_neighbors(
    values: Tensor, neighbors: Neighbors, expected: Expected, report: CheckReport
) -> None:
    room = expected.sigma if expected.sigma is not None else torch.zeros_like(expected.values)
    wrong = neighbors.wrong(values[0], room)
    if bool(wrong.any()):
        bounds = Expected(neighbors.exact, neighbors.below, neighbors.above)
        places = describe_places(values[0], bounds, wrong)
        first = tuple(int(index) for index in wrong.nonzero()[0])
        sides = float(neighbors.below[first]), float(neighbors.above[first])
        raise CheckFailure(
            f"{report.name} is wrong: {int(wrong.sum()):,} of {wrong.numel():,} values are neither "
            f"neighbor of the exact value" + (f": {places or scattered(wrong)}"),
            report,
            f"at {list(first)}: {float(values[0][first]):g}, neighbors {sides[0]:g} and "
            f"{sides[1]:g}, exact {float(neighbors.exact[first]):g}",
        )


def _hold_randomness(
    draws: Sequence[Tensor],
    values: Tensor,
    variance: Tensor,
    report: CheckReport,
    *,
    is_biased: bool,
) -> None:
    """Refuse draws that are all the same, or whose values move together."""
    if not float(variance.sum()) > 0:
        return
    if all(same_bits(draws[0], draw) for draw in draws[1:]):
        raise CheckFailure(
            f"{report.name} does not round at random: {len(draws)} seeds give the same bits", report
        )
    spread = float(values.var(0).sum() / variance.sum())
    if not 0.5 < spread < 2.0 and not is_biased:
        raise CheckFailure(
            f"{report.name} does not round at random between neighbors alone: its values vary "
            f"{spread:.2g} times as much as they should",
            report,
        )
    deviations = values - values.mean(0)
    mean = _Mean(deviations.square().mean(0), variance, variance, variance)
    for words, line in () if is_biased else mean.lines("{}"):
        active = line.variance > line.variance.max() / 16
        if int(active.sum()) >= FEWEST and float(line.bias[active].sum()) < FROZEN * float(
            line.variance[active].sum()
        ):
            raise CheckFailure(
                f"{report.name} does not round {words} at random: its values vary by less than a "
                f"quarter of what they should over {len(draws)} seeds",
                report,
            )
    for dim in range(variance.dim()) if variance.dim() > 1 else ():
        together = deviations.sum(dim + 1).square().mean(0)
        independent = deviations.square().sum(dim + 1).mean(0)
        ratio = float(together.sum() / independent.sum().clamp_min(torch.finfo(torch.float64).tiny))
        if variance.shape[dim] > 3 and ratio > 1 + min(0.25 * (variance.shape[dim] - 1), 2.0):
            along = 1 - dim if variance.dim() == 2 else 0
            raise CheckFailure(
                f"{report.name} rounds values of one {axis_word(variance.dim(), along)} by the same"
                " random numbers: they move together",
                report,
                f"their sum varies {ratio:.2g} times as much as that of independent values",
            )


def _hold_means(mean: _Mean, share: Tensor | None, report: CheckReport) -> None:
    """Refuse a mean that lies further from the exact result than the noise of such a mean."""
    parts = [("", mean)]
    for part in range(SHARES):
        if share is None:
            break
        inside = (share > part / SHARES) & (share <= (part + 1) / SHARES)
        words = f" for values {part}/{SHARES} to {part + 1}/{SHARES} of a step above a neighbor"
        parts.append((words, mean.where(inside)))
    for words, line in [*parts, *mean.lines(" in {}")]:
        ratio = line.ratio()
        if abs(ratio) > SURE:
            raise CheckFailure(
                f"{report.name} rounds with a bias{words}: the mean over {DRAWS} seeds is too "
                f"{'large' if ratio > 0 else 'small'}, {abs(ratio):.2g} times its noise",
                report,
            )


def _hold_factors(mean: _Mean, report: CheckReport) -> None:
    """Refuse a mean that is the exact result times a factor: all of it, or one row or column."""
    for words, line in [("", mean), *mean.lines("{} of ")]:
        ratio = line.times_exact().ratio()
        if abs(ratio) > SURE:
            factor = 1 + float((line.bias * line.exact).sum() / line.exact.square().sum())
            raise CheckFailure(
                f"{report.name} is wrong: {words}the mean over {DRAWS} seeds is "
                f"{factor_words(factor, abs(factor - 1) / abs(ratio))} times the exact result",
                report,
                f"{abs(ratio):.2g} times the noise of such a mean",
            )


def _hold_terms(
    subject: KernelSubject, ideal: list[Any], bias: Tensor, report: CheckReport
) -> None:
    """Refuse a mean of products that lacks a term of its sum, or has one twice."""
    if subject.output:
        return
    exact = subject.unquantized(ideal)
    product = find_product(ideal, find_axes(subject.like, ideal), exact)
    if product is None:
        return
    shares, _ = product.find_terms(bias, ideal)
    if any(abs(abs(share) - 1) > WHOLE for share in shares.values()) or not shares:
        return
    share = sum(shares.values()) / len(shares)
    fault = TermFault(len(shares), min(shares), max(shares), share)
    raise CheckFailure(
        f"{report.name} is wrong: {fault.words('term', 'terms')} in the sum over "
        f"{product.axis.length:,} ({product.axis})",
        report,
        f"as the mean over {DRAWS} seeds shows",
    )
