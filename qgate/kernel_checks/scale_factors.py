"""Scales that are too large or too small by a factor, found from the error that they make.

The quantization error of a tensor grows with its scale. So the energy by which a result differs
from that of unquantized arguments says about how large the scales were, and only factors near that
are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np
from torch import Tensor

from qgate.causes.scales import quantize_with_scales
from qgate.expected.narrow_floats import in_float64
from qgate.formats.settings import QuantizerSettings
from qgate.kernel_checks.closeness import energy_left
from qgate.kernel_checks.declared import from_array, to_array
from qgate.kernel_checks.runs import Failing

NEAR, STEP = 0.12, 0.002
"""How far from the factor that the energy says others are tried, and by which steps."""
BELOW = 1.04
"""A factor up to which the energy says nothing: smaller scales saturate, and are all tried."""
SMALLEST, COARSE = 0.4, 0.003
LARGEST = 64.0
EXPLAINED = 0.05
"""Share of the energy of differences that a factor may leave."""
MOST_SETTLED = 3
"""Factors of those tried that are looked at more closely, the nearest ones."""
FACTOR = "times the right scales"
ITSELF = 1e-3
"""Distance from 1 up to which a factor is none."""


def describe_scale_factor(case: Failing) -> str:
    """Name the factor by which scales of arguments are off, codes included; empty if none is."""
    subject = case.subject
    if subject.output or not bool(case.actual.isfinite().all()):
        return ""
    scaled = [
        position
        for position, quantization in subject.inputs.items()
        if (q := quantization.quantizer) is not None
        and (q.format.kind == "element" and q.granularity is not None)
        and q.zero_point is None
        and q.rotation is None
        and not quantization.is_packed
    ]
    if not scaled:
        return ""
    whole, sides = _energies(case)
    for group in [[position] for position in scaled] + ([scaled] if len(scaled) > 1 else []):
        own = sum(sides[position] for position in group)
        beside = sum(energy for position, energy in sides.items() if position not in group)
        ratio = math.sqrt(max(whole - beside, 0.0) / own) if own else 0.0
        if words := _of_group(case, group, ratio):
            return words
    return ""


def _energies(case: Failing) -> tuple[float, dict[int, float]]:
    """Return the energy that quantization adds to a result, and each ideal argument by itself."""
    exact = case.subject.unquantized(case.arguments)
    sides = {}
    for position in case.subject.inputs:
        changed = [in_float64(value) for value in case.arguments]
        changed[position] = case.ideal[position]
        values = case.subject.values_of(changed, case.choices)
        sides[position] = float((values - exact).square().sum())
    return energy_left(case.actual.double(), exact), sides


def _of_group(case: Failing, group: Sequence[int], ratio: float) -> str:
    """Look for a factor of some arguments; `ratio` is the one that the energy tells."""
    actual = case.actual.double()

    def left(factor: float) -> float:
        return energy_left(actual, _result(case, group, factor))

    tried = sorted((left(factor), factor) for factor in _factors(ratio))
    nearest = [factor for _, factor in tried[:MOST_SETTLED]]
    least, factor = min((_settled(left, factor) for factor in nearest), default=(math.inf, 1.0))
    before = energy_left(actual, case.expected.values)
    if least > EXPLAINED * before or abs(factor - 1) < ITSELF:
        return ""
    which = f"argument {group[0]} is" if len(group) == 1 else f"arguments {_listed(group)} are"
    words = f"{which} quantized with {factor:.3g} {FACTOR}"
    return words + _codes_words(case.subject.inputs[group[0]].quantizer, factor)


def _listed(group: Sequence[int]) -> str:
    return f"{', '.join(map(str, group[:-1]))} and {group[-1]}"


def _codes_words(q: QuantizerSettings | None, factor: float) -> str:
    if q is None or q.format.name.startswith("fp"):
        return "" if factor > 1 else ": large values saturate"
    if factor < 1:
        return ": large values saturate"
    most = q.format.max
    return f": {max(1, round(most / factor))} of {most:g} codes are used"


def _factors(ratio: float) -> Iterator[float]:
    """List the factors near the one that the energy tells, and those it does not tell apart."""
    if ratio > LARGEST:
        return
    if ratio > BELOW:
        steps = math.ceil(math.log((1 + NEAR) / (1 - NEAR)) / STEP)
        for number in range(steps + 1):
            yield ratio * (1 - NEAR) * math.exp(STEP * number)
    yield from itertools.takewhile(
        lambda factor: factor < BELOW + NEAR,
        (SMALLEST * math.exp(COARSE * number) for number in itertools.count()),
    )


def _settled(left: Callable[[float], float], factor: float) -> tuple[float, float]:
    """Return the least energy that factors near one leave, and the factor.

    Ratios of whole numbers count, such as 2 and 127/63: with a factor beside them, values halfway
    between two codes would go to other ones.
    """
    best = left(factor), factor
    for finer in (1, 2, 3, 4):
        step = STEP * 3.0**-finer
        near = (best[1] * math.exp(step * number) for number in (-2, -1, 1, 2))
        best = min([best, *((left(value), value) for value in near)])
    plain = {float(Fraction(best[1]).limit_denominator(most)) for most in (2, 16, 128)}
    return min([best, *((left(value), value) for value in plain)])


def _result(case: Failing, group: Sequence[int], factor: float) -> Tensor:
    changed = list(case.ideal)
    for position in group:
        q = case.subject.inputs[position].quantizer
        assert q is not None
        source = case.arguments[position]
        values = quantize_with_scales(
            to_array(source), q, lambda scales: scales * np.float64(factor)
        )
        changed[position] = from_array(values, source)
    return case.result_of(changed)
