"""Other arguments than the given ones under which the reference gives a kernel's result."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qgate.causes.casts import wrong_casts
from qgate.causes.faults import WrongCast
from qgate.causes.places import factor_words
from qgate.causes.readings import wrong_readings
from qgate.expected.conventions import NUDGE, Convention
from qgate.expected.intermediates import HALVES
from qgate.expected.narrow_floats import size_of
from qgate.expected.noise import Expected, evaluate
from qgate.formats import Quantizer
from qgate.formats.options import Floats
from qgate.kernel_checks.closeness import energy_left
from qgate.kernel_checks.declarations import COMMON, declaration_text
from qgate.kernel_checks.declared import Quantization, declare, from_array, to_array
from qgate.kernel_checks.runs import Failing
from qgate.kernel_checks.subject import RESULT, KernelSubject
from qgate.models.refusals import LENGTH_REFUSALS
from qgate.stats.bits import short_name

_NEWTON_STEPS, _SLOPE_STEP = 8, 2.0**-20

ROUNDINGS, LEFT = 2.0, 0.1
"""Roundings to 16 bits that an explanation may leave, and the share of what was off before."""
FIRST_DOUBLE = 1000
"""The number of the first cast of what was in another format before."""
MOST_WORK = 2**27
"""Elements of arguments and results that are computed for all faulty casts together."""
FEWEST_CASTS = 16
"""Faulty casts that are tried whatever they cost, the plainest ones."""
ALMOST = 0.02
"""Share of the energy of a difference, and of a result, that a faulty cast may leave: few codes."""
NEAR = 0.02
"""Relative RMS distance from which on another explanation is held at float noise of its own."""


def describe_wrong_cast(
    case: Failing, is_likely: Callable[[str], bool] | None = None
) -> tuple[str, list[TriedCast]]:
    """Replace ideal casts by faulty ones until one explains the result; return all that did not.

    is_likely  tells by their words which are tried
    """
    tried: list[TriedCast] = []
    if RESULT in case.subject.slots:
        words = _wrong_cast_of_result(case)
        if words:
            return words, tried
    width, actual = case.expected.width, case.actual.double()
    values: dict[tuple[Any, int], Tensor | None] = {}
    affordable = MOST_WORK // max(work_of(case), 1)
    suspects = (casts for casts in _suspects(case.subject, case.arguments) if RESULT not in casts)
    for numbered in itertools.islice(suspects, max(affordable, FEWEST_CASTS)):
        casts = {position: cast for position, (_, cast) in numbered.items()}
        words = _words_of(casts)
        if is_likely and not is_likely(words):
            continue
        changed = list(case.ideal)
        for position, (number, cast) in numbered.items():
            if (position, number) not in values:
                values[position, number] = _faulty(cast, case.arguments[position])
            changed[position] = values[position, number]
        if any(changed[position] is None for position in casts):
            continue
        result = case.result_of(changed)
        if result.shape != width.shape:
            continue
        if Expected.around(result, width).explains(case.actual) or _explains_nearly(
            case, result, changed
        ):
            return words, tried
        tried.append(TriedCast(energy_left(actual, result), casts))
    # Codes within float noise of where a faulty cast cuts off may be either.
    best = min(tried, key=lambda each: each.energy, default=None)
    energies = (float(x.square().sum()) for x in (case.residual, actual))
    if best and best.energy < ALMOST * min(energies):
        faulty = best.faulty(case).arguments
        zeros = [torch.zeros_like(x) if n in best.casts else x for n, x in enumerate(faulty)]
        # An argument that is not used at all is nearly one with small values.
        if best.energy < energy_left(actual, case.result_of(zeros)):
            return best.words, tried
    return "", tried


def _wrong_cast_of_result(case: Failing) -> str:
    subject, width = case.subject, case.expected.width
    before = evaluate(subject.like, case.ideal)
    of_result = (casts[RESULT] for casts in _suspects(subject, case.arguments) if RESULT in casts)
    for _, cast in of_result:
        sources = (before, before * (1 + NUDGE), before * (1 - NUDGE))
        results = [result for source in sources if (result := _faulty(cast, source)) is not None]
        if len(results) < len(sources) or results[0].shape != width.shape:
            continue
        stacked = torch.stack(results)
        explained = Expected(results[0], stacked.amin(0) - width, stacked.amax(0) + width)
        if explained.explains(case.actual):
            return f"the result {cast.words}"
    return ""


def work_of(case: Failing) -> int:
    """Return the elements of arguments and result that are computed for each fault.

    Those of a format whose definition takes long count as more.
    """
    quantizers = [slot.quantizer for slot in case.subject.slots.values()]
    efforts = [q.format.effort for q in quantizers if q and q.format.kind == "block"]
    return size_of([*case.ideal, case.actual]) * max(efforts, default=1)


@dataclass(frozen=True)
class TriedCast:
    """Faulty casts of arguments by their positions, and the energy that they leave of a result."""

    energy: float
    casts: Mapping[Any, WrongCast]

    def faulty(self, case: Failing) -> FaultyArguments:
        """Return the arguments that they make."""
        changed = list(case.ideal)
        for position, cast in self.casts.items():
            changed[position] = _faulty(cast, case.arguments[position])
        return FaultyArguments(case, self.casts, changed)

    @property
    def is_same_kind(self) -> bool:
        """Tell if each is a cast of its format."""
        return all(cast.is_same_kind for cast in self.casts.values())

    @property
    def words(self) -> str:
        return _words_of(self.casts)


@dataclass(frozen=True)
class FaultyArguments:
    """Arguments that faulty casts make."""

    case: Failing
    casts: Mapping[Any, WrongCast]
    arguments: list[Any]

    def alternatives(self) -> Iterator[list[Any]]:
        """List what the same casts make under other conventions."""
        for position in self.casts:
            source = self.case.arguments[position]
            if not isinstance(source, Tensor):
                continue
            faulty = self.arguments[position]
            for values in self._of(position, source, faulty):
                if values.shape == faulty.shape:
                    yield [*self.arguments[:position], values, *self.arguments[position + 1 :]]

    def _of(self, position: int, source: Tensor, faulty: Tensor) -> Iterator[Tensor]:
        alternatives = self.casts[position].alternatives
        if alternatives is not None:
            for cast in alternatives(short_name(source.dtype)):
                values = WrongCast("", cast).apply(to_array(source))
                if values is not None:
                    yield from_array(values, source)
            return
        quantization = self.case.subject.inputs.get(position)
        if quantization is None or quantization.is_packed:
            return
        ideal = quantization.ideal(source)
        # Codes in another place keep their ratio to the right values, others their difference.
        ratio = torch.where(ideal == 0, torch.ones_like(ideal), faulty / ideal)
        for choice in range(1, len(quantization.choices)):
            other = quantization.ideal(source, choice)
            yield other * ratio
            yield other + (faulty - ideal)


def _words_of(casts: Mapping[Any, WrongCast]) -> str:
    """Say what is wrong with arguments whose casts have the same words."""
    words = next(iter(casts.values())).words
    if len(casts) > 1:
        return f"each of arguments {', '.join(map(str, casts))} {words}"
    return f"argument {next(iter(casts))} {words}"


def _faulty(cast: WrongCast, argument: Any) -> Tensor | None:
    source = argument if isinstance(argument, Tensor) else argument.decode(torch.float64)
    values = cast.apply(to_array(source))
    return None if values is None else from_array(values, source)


def _explains_nearly(case: Failing, result: Tensor, arguments: list[Any]) -> bool:
    """Say if values near the actual ones are as near as the float noise of other arguments."""
    actual = case.actual.double()
    if _leaves_roundings(case, result):
        return True
    if not float((actual - result).square().sum()) < NEAR**2 * float(result.square().sum()):
        return False
    return case.subject.expected_from(arguments, case.choices).explains(case.actual)


def _leaves_roundings(case: Failing, result: Tensor) -> bool:
    """Tell if a result in 16 bits differs by hardly more than one rounding, and by much before."""
    if case.actual.dtype not in HALVES or not bool(result.isfinite().all()):
        return False
    energy = float((case.actual.double() - result).square().sum())
    rounding = torch.finfo(case.actual.dtype).eps / 12**0.5 * float(result.norm())
    return energy < min((ROUNDINGS * rounding) ** 2, LEFT * float(case.residual.square().sum()))


def _suspects(
    subject: KernelSubject, arguments: Sequence[Any]
) -> Iterator[dict[Any, tuple[int, WrongCast]]]:
    """List numbered faulty casts by position: of an argument, of some in one format, of the result.

    Arguments that are not declared may be quantized like the others.
    """
    slots = [*subject.inputs, *([RESULT] if subject.output else [])]
    groups: list[list[Any]] = [[slot] for slot in slots]
    for same in _alike(subject):
        groups += [list(some) for size in (2, 3) for some in itertools.combinations(same, size)]
    for group in groups:
        yield from _same_casts({position: subject.slots[position] for position in group})
    for position, argument in enumerate(arguments):
        if position in subject.inputs or not isinstance(argument, Tensor):
            continue
        if not argument.is_floating_point():
            continue
        for number, quantization in enumerate(subject.inputs.values()):
            words = f"is quantized to {quantization.name}, and is not declared to be"
            yield {position: (number, WrongCast(words, quantization.choices[0]))}
    for position in subject.inputs:
        for number, cast in enumerate(_double_casts(subject, position, arguments[position])):
            yield {position: (FIRST_DOUBLE + number, cast)}


def _same_casts(
    slots: Mapping[Any, Quantization],
) -> Iterator[dict[Any, tuple[int, WrongCast]]]:
    """List the faulty casts that arguments have in common, by their words.

    A factor of scales that are shared in several ways has words of its own.
    """
    quantizers = [quantization.quantizer for quantization in slots.values()]
    first, *others = ([*wrong_casts(q)] if q is not None else [] for q in quantizers)
    by_words: list[dict[str, list[tuple[int, WrongCast]]]] = []
    for casts in others:
        by_words.append(defaultdict(list))
        for number, cast in enumerate(casts):
            by_words[-1][cast.words].append((number, cast))
    times: Counter[str] = Counter()
    are_equal = len({repr(q) for q in quantizers}) == 1
    for number, cast in enumerate(first):
        if cast.is_factor and not are_equal:
            continue
        same = [listed[cast.words][times[cast.words] :][:1] for listed in by_words]
        times[cast.words] += 1
        if all(same):
            yield dict(zip(slots, [(number, cast), *(entry for [entry] in same)], strict=True))


def _double_casts(subject: KernelSubject, position: int, argument: Any) -> Iterator[WrongCast]:
    """List casts of an argument that was in another common format before."""
    quantization = subject.inputs[position]
    if not isinstance(argument, Tensor):
        return
    for name, options in COMMON:
        quantizer = Quantizer(name, **options)
        if repr(quantizer) == repr(quantization.quantizer):
            continue
        first = declare(quantizer, f"argument {position}", argument.dtype)

        def values(x: Floats, first: Quantization = first) -> Floats:
            before = first.ideal(from_array(x, argument)).to(argument.dtype)
            return quantization.choices[0](to_array(before))

        def alternatives(
            _dtype: str, first: Quantization = first
        ) -> Iterable[Callable[[Floats], Floats]]:
            for choice in quantization.choices:

                def again(x: Floats, choice: Convention = choice) -> Floats:
                    before = first.ideal(from_array(x, argument)).to(argument.dtype)
                    return choice(to_array(before))

                yield again

        text = declaration_text(name, options)
        words = f"is quantized twice: to {text}, then to {quantization.name}"
        yield WrongCast(words, values, alternatives)


def _alike(subject: KernelSubject) -> list[list[Any]]:
    """List the positions of arguments that are quantized to one format."""
    kinds: dict[str, list[Any]] = {}
    for position, quantization in subject.inputs.items():
        kinds.setdefault(quantization.name, []).append(position)
    return list(kinds.values())


def describe_wrong_reading(case: Failing) -> str:
    """Name another reading of an argument under which the reference gives the actual result."""
    for reading in wrong_readings(case.ideal, list(case.subject.inputs)):
        try:
            result = case.result_of(reading.change)
        except LENGTH_REFUSALS:
            continue
        if result.shape != case.expected.width.shape:
            continue
        explained = Expected.around(result, case.expected.width)
        if explained.explains(case.actual) or _explains_nearly(case, result, reading.change):
            return reading.words
    return _wrong_weight(case)


def _wrong_weight(case: Failing) -> str:
    """Name an argument of which the result holds another multiple than the reference's."""
    actual, expected = case.actual.double(), case.expected.values
    for position, argument, of_changed in _changeable(case):
        share = expected - of_changed(torch.zeros_like(argument))
        energy = float(share.square().sum())
        if not 0 < energy < math.inf:
            continue
        factor = 1 + float(((actual - expected) * share).sum()) / energy
        result = expected + (factor - 1) * share
        if Expected.around(result, case.expected.width).explains(case.actual):
            noise = float((actual - result).square().mean()) ** 0.5 / energy**0.5
            return f"argument {position} counts {factor_words(factor, noise)} times in the result"
    return ""


def describe_scaled_argument(case: Failing) -> str:
    """Name an argument that counts a number of times wherever the reference reads it."""
    actual = case.actual.double()
    for position, argument, of_changed in _changeable(case):
        for factor in (1.0, -1.0):
            distance = math.inf
            for _ in range(_NEWTON_STEPS):
                result = of_changed(argument * factor)
                missing = actual - result
                if Expected.around(result, case.expected.width).explains(case.actual):
                    noise = float(missing.square().mean().sqrt() / argument.square().mean().sqrt())
                    return f"argument {position} counts {factor_words(factor, noise)} times"
                before, distance = distance, float(missing.square().sum())
                slope = of_changed(argument * (factor + _SLOPE_STEP)) - result
                slope *= 1 / _SLOPE_STEP
                energy = float(slope.square().sum())
                if not (distance < before / 2 and 0 < energy < math.inf):
                    break
                factor += float((missing * slope).sum()) / energy
    return ""


def _changeable(case: Failing) -> Iterator[tuple[int, Tensor, Callable[[Tensor], Tensor]]]:
    """Yield tensors that are not all zero, with what the reference makes of another one there."""
    if case.subject.output or not bool(case.actual.isfinite().all()):
        return
    for position, argument in enumerate(case.ideal):
        if not (isinstance(argument, Tensor) and argument.is_floating_point() and argument.any()):
            continue

        def of_changed(other: Tensor, position: int = position) -> Tensor:
            changed = [*case.ideal[:position], other, *case.ideal[position + 1 :]]
            return evaluate(case.subject.like, changed)

        yield position, argument, of_changed
