"""Faults of what a kernel quantizes inside: another cast at a stage, or a cast at another place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from qgate.causes.casts import wrong_casts
from qgate.causes.faults import Fault, Function, WrongCast
from qgate.causes.integers import code_faults, grid_faults
from qgate.expected.dispatching import DispatchMode
from qgate.expected.noise import evaluate
from qgate.expected.stages import QUANTIZED, StageCast, StagedFunction
from qgate.formats.options import Floats
from qgate.kernel_checks.closeness import energy_left
from qgate.kernel_checks.declared import Quantization, from_array, to_array
from qgate.kernel_checks.explanations import MOST_WORK, work_of
from qgate.kernel_checks.runs import Failing
from qgate.kernel_checks.smoothing import smoothing_faults
from qgate.kernel_checks.subject import RESULT
from qgate.models.refusals import LENGTH_REFUSALS

LEFT = 0.1
"""Share of what was off that a fault may leave: codes that float noise decides."""
ALIKE = 1.05
"""Times the least energy up to which a plainer fault is named."""
FEWEST = 64
"""Faults that are tried whatever they cost, the plainest ones."""
MOST_CALLS = 8
"""Calls of a stage up to which each is tried alone; of more, the first and the last."""


class _CannotOccur(ValueError):
    """A fault that values of this shape cannot have."""


def stage_faults(case: Failing) -> Iterator[Fault[Function]]:
    """List the faults that the stages of a reference may have, the plainest first."""
    like = case.subject.like
    if not isinstance(like, StagedFunction):
        return
    recording = like.keeping()
    evaluate(recording, case.ideal)
    run = recording.last
    yield from smoothing_faults(like, case.ideal)
    for name, quantization in case.subject.stages.items():
        inputs = [x for of, x in zip(run.names, run.inputs, strict=True) if of == name]
        casts = _casts(quantization)
        plain = list(itertools.islice(casts, 1))
        for cast in plain:
            yield Fault(f"stage {name} {cast.words}", like.with_cast(name, _faulty(cast)))
        for number in _some(len(inputs)):
            words = f"stage {name} {plain[0].words} in call {number + 1} of {len(inputs)}"
            yield Fault(words, like.with_cast((name, number), _faulty(plain[0])))
        yield from _elsewhere(like, name, inputs, case.ideal)
        for cast in casts:
            yield Fault(f"stage {name} {cast.words}", like.with_cast(name, _faulty(cast)))


def _some(count: int) -> list[int]:
    """Return the calls that are tried alone, those of experts or tiles."""
    if count < 2:
        return []
    return list(range(count)) if count <= MOST_CALLS else [0, count - 1]


def describe_wrong_stage(case: Failing) -> str:
    """Name the fault of a stage that explains a result but for codes that float noise decides."""
    output, choices = case.subject.output, case.choices
    actual = case.actual.double()
    if not isinstance(case.subject.like, StagedFunction) or not bool(actual.isfinite().any()):
        return ""
    before = energy_left(actual, case.expected.values)
    entries = []
    affordable = max(MOST_WORK // max(work_of(case), 1), FEWEST)
    for number, fault in enumerate(itertools.islice(stage_faults(case), affordable)):
        try:
            values = evaluate(fault.change, case.ideal)
        except LENGTH_REFUSALS:
            continue
        if output is not None:
            values = output.ideal(values, choices[RESULT])
        entries.append((energy_left(actual, values), number, fault.words))
    least = min((energy for energy, _, _ in entries), default=before)
    if not least <= LEFT * before:
        return ""
    return min((number, words) for energy, number, words in entries if energy <= ALIKE * least)[1]


def _faulty(cast: WrongCast) -> StageCast:
    def values(x: Tensor) -> Tensor:
        result = cast.apply(to_array(x))
        if result is None:
            raise _CannotOccur(cast.words)
        return from_array(result, x)

    return StageCast(values)


def _casts(quantization: Quantization) -> Iterator[WrongCast]:
    ideal = quantization.choices[0]
    if quantization.quantizer is not None:
        listed = wrong_casts(quantization.quantizer)
        yield next(listed)
    else:
        listed = iter(())
        yield WrongCast(f"is not quantized to {quantization.name}", lambda x: x)
    yield WrongCast(
        "is quantized after its rows were normalized to a sum of 1, not before",
        lambda x: _normalized(x, ideal),
    )
    q = quantization.quantizer
    of_codes = [] if q is None else [*code_faults(q), *grid_faults(q)]
    yield from of_codes
    # Rounded to 16 bits and not quantized is not quantized.
    before = {cast.words for cast in of_codes}
    for cast in listed:
        if cast.words not in before and not cast.words.startswith(("is bf16,", "is fp16,")):
            yield cast


def _normalized(x: Floats, ideal: Callable[[Floats], Floats]) -> Floats:
    """Quantize nonnegative rows after they were divided by their sums."""
    if x.ndim < 2 or not bool((x >= 0).all()):
        raise ValueError("no probabilities")
    sums = x.sum(-1, keepdims=True)
    sums[sums == 0] = 1.0
    result: Floats = ideal(x / sums) * sums
    return result


# A cast at another place --------------------------------------------------------------------------


def _elsewhere(
    like: StagedFunction, name: str, inputs: Sequence[Tensor], ideal: Sequence[Any]
) -> Iterator[Fault[Function]]:
    """List the operators before and after which the values may be quantized instead."""
    cast = (like.casts or {})[name]
    shapes = {x.shape for x in inputs}
    listing = _Operators(shapes, len(inputs))
    with listing:
        evaluate(like, ideal)
    passing = like.with_cast(name, StageCast(torch.clone))
    for operator, operand in listing.before:
        words = f"stage {name} is quantized before {_word(operator)}, not after"
        yield Fault(words, _cast_at(passing, shapes, cast, operator, operand))
    for operator in listing.after:
        words = f"stage {name} is quantized after {_word(operator)}, not before"
        yield Fault(words, _cast_at(passing, shapes, cast, operator, None))


def _word(operator: str) -> str:
    return operator.strip("_").replace("_", " ")


class _Operators(DispatchMode):
    """List operators with values of some shapes: before casts, with the operand, and after."""

    def __init__(self, shapes: set[torch.Size], casts: int) -> None:
        super().__init__()
        self.shapes, self.casts = shapes, casts
        self.before: dict[tuple[str, int], None] = {}
        self.after: dict[str, None] = {}
        self.seen = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[-1]
        if function is QUANTIZED:
            self.seen += 1
        elif not function.is_view and isinstance(result, Tensor) and result.shape in self.shapes:
            for operand, value in enumerate(args[:2]):
                if _is_of(value, self.shapes) and not self.seen:
                    self.before.setdefault((name, operand))
            if self.seen and result.is_floating_point():
                self.after.setdefault(name)
        return result


def _is_of(value: Any, shapes: set[torch.Size]) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape in shapes


class _CastAt(DispatchMode):
    """Quantize one operand of an operator, or its result."""

    def __init__(
        self, shapes: set[torch.Size], cast: StageCast, operator: str, operand: int | None
    ) -> None:
        super().__init__()
        self.shapes, self.cast, self.operator, self.operand = shapes, cast, operator, operand

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_it = function._schema.name.split("::")[-1] == self.operator
        if is_it and self.operand is not None and _is_of(args[self.operand], self.shapes):
            args = list(args)
            with _disable_current_modes():
                args[self.operand] = self.cast(args[self.operand])
        result = function(*args, **(kwargs or {}))
        if is_it and self.operand is None and _is_of(result, self.shapes):
            with _disable_current_modes():
                result = self.cast(result)
        return result


def _cast_at(
    like: StagedFunction,
    shapes: set[torch.Size],
    cast: StageCast,
    operator: str,
    operand: int | None,
) -> Function:
    def faulty(*arguments: Any) -> Any:
        with _CastAt(shapes, cast, operator, operand):
            return like(*arguments)

    return faulty
