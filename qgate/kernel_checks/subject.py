"""A kernel with what is declared of it: what it gets, what it should return, how it is run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qgate.causes.faults import Function
from qgate.device_errors import device_error, lost_device
from qgate.errors import CopyableError
from qgate.expected.derived import DerivedInput, are_independent
from qgate.expected.narrow_floats import (
    are_finite,
    in_float64,
    is_narrow,
    is_wide_float,
    same_bits,
    shares_memory,
    size_of,
    widened,
    without_subclass,
)
from qgate.expected.noise import Expected, entries_before, evaluate, expect, with_held_codes
from qgate.expected.stages import Key, StageCast, StagedFunction, stage_slot, without_casts
from qgate.formats import Encoded
from qgate.kernel_checks.declared import Quantization
from qgate.kernel_checks.input_facts import EntriesOf, InputFacts, ReferenceResult
from qgate.kernel_checks.watching import watched
from qgate.tensor_inputs import unreadable

Choices = dict[Any, int]
"""Which convention each quantized argument, or the result, is taken to follow."""
RESULT = "result"
MOST_KEPT, MOST_DOUBLES = 1 << 16, 8
"""Elements of expected results kept for each input; 8-bit tensors that are kept in float64."""


class KernelRefusal(Exception):
    """An exception of the kernel, which is the cause of this one."""


class UnusableResult(CopyableError, ValueError):
    """A result that is no tensor of values; `kind` is what it is."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class KernelSubject:
    """A kernel, the reference function, and the quantization of arguments and result.

    stages      name → quantization of what the reference quantizes inside
    exact       what the reference gave for the example in its first call
    host_like   the reference for copies on the CPU of arguments of a device with positions
    changed     positions of arguments that the reference changes in place
    in_place    positions that the last call of the kernel changed, True if it returned them
    paces       seconds per value of the arguments that each call of the kernel took
    """

    kernel: Function
    like: Function
    name: str
    inputs: dict[int, Quantization]
    output: Quantization | None
    pack: dict[int, Function]
    unpack: Function | None
    arithmetic: str
    stages: dict[str, Quantization] = field(default_factory=dict)
    exact: Tensor | None = None
    host_like: Function | None = None
    changed: frozenset[int] = frozenset()
    in_place: dict[int, bool] = field(default_factory=dict, repr=False)
    paces: list[float] = field(default_factory=list, repr=False)
    _casts: dict[Any, tuple[Any, ...]] = field(default_factory=dict, repr=False)
    _doubles: dict[int, tuple[Tensor, Any]] = field(default_factory=dict, repr=False)
    _known: dict[int, InputFacts] = field(default_factory=dict, repr=False)
    _ideal: dict[Any, tuple[list[Any], Sequence[Any]]] = field(default_factory=dict, repr=False)
    _measured: dict[Any, tuple[Expected, Sequence[Any]]] = field(default_factory=dict, repr=False)

    @property
    def slots(self) -> dict[Any, Quantization]:
        """Return what is quantized: positions of arguments, "stage NAME", and "result"."""
        inside = {stage_slot(name): quantization for name, quantization in self.stages.items()}
        return {**self.inputs, **inside, **({RESULT: self.output} if self.output else {})}

    def under(self, choices: Choices) -> KernelSubject:
        """Return the subject whose reference quantizes inside by these conventions."""
        if not isinstance(self.like, StagedFunction):
            return self
        casts: dict[Key, StageCast] = {
            name: quantization.cast(choices[stage_slot(name)])
            for name, quantization in self.stages.items()
        }
        return replace(self, like=StagedFunction(self.like.function, casts))

    def _of(self, arguments: Sequence[Any]) -> InputFacts:
        return self._known.setdefault(id(arguments), InputFacts(arguments))

    def ideal(self, arguments: Sequence[Any], choices: Choices) -> list[Any]:
        """Return the arguments with every declared one ideally quantized, in float64."""
        key = id(arguments), tuple(choices.values())
        if key not in self._ideal:
            self._ideal.clear()  # of the last input alone: they may be large
            self._ideal[key] = self._quantized(arguments, choices), arguments
        return list(self._ideal[key][0])

    def _quantized(self, arguments: Sequence[Any], choices: Choices) -> list[Any]:
        values = [self._doubled(argument) for argument in arguments]
        for position, quantization in self.inputs.items():
            if quantization.is_packed:
                if not isinstance(arguments[position], Encoded):
                    packed = quantization.pack(values[position])
                    values[position] = packed.decode(torch.float64)
            else:
                values[position] = self.cast(position, arguments[position], choices)[0]
        return values

    def _doubled(self, argument: Any) -> Any:
        """Return an argument in float64; of 8-bit floats, which are slow to read, once a tensor."""
        if not is_narrow(argument):
            return in_float64(source_of(argument))
        if id(argument) not in self._doubles:
            while len(self._doubles) >= MOST_DOUBLES:
                del self._doubles[next(iter(self._doubles))]
            self._doubles[id(argument)] = argument.double(), argument
        return self._doubles[id(argument)][0]

    def cast(
        self, position: int, argument: Tensor, choices: Choices, *, others: bool = False
    ) -> tuple[Tensor, ...]:
        """Return the ideal values of an argument, made once per tensor, or their alternatives."""
        quantization, choice = self.inputs[position], choices[position]
        key = (position, id(argument), choice, others)
        if key not in self._casts:
            if not others:
                self._casts[key] = quantization.ideal(argument, choice), argument
            elif quantization.choices[choice].is_exact:
                self._casts[key] = (argument,)
            else:
                self._casts[key] = *quantization.alternatives(argument, choice), argument
        return self._casts[key][:-1]

    def values(self, arguments: Sequence[Any], choices: Choices) -> Tensor:
        """Return the expected values without their noise."""
        return self.values_of(self.ideal(arguments, choices), choices)

    def values_of(self, ideal: Sequence[Any], choices: Choices) -> Tensor:
        """Return what the reference gives for quantized arguments, quantized as the result is."""
        values = evaluate(self.under(choices).like, ideal)
        return self.output.ideal(values, choices[RESULT]) if self.output else values

    def unquantized(self, arguments: Sequence[Any]) -> Tensor:
        """Return what the reference gives for the arguments as they are; it is kept if small."""
        exact = without_casts(self.like)
        values = evaluate(exact, [self._doubled(argument) for argument in arguments])
        if values.numel() <= MOST_KEPT:
            self._of(arguments).unquantized = values
        return values

    def try_on_host(self, arguments: Sequence[Any]) -> None:
        """Call the reference with copies on the CPU where arguments lie on a device.

        It raises there for a position out of range, which would end the device.
        """
        if self.host_like is not None:
            sources = [source_of(argument) for argument in arguments]
            evaluate(self.host_like, [v.cpu() if isinstance(v, Tensor) else v for v in sources])

    def expected(
        self,
        arguments: Sequence[Any],
        choices: Choices,
        arithmetic: str | None = None,
        *,
        ties: bool = True,
    ) -> Expected:
        """Return the expected values and the bounds that float noise explains.

        ties  True if codes within float noise of a rounding boundary may be either
        """
        if ties:
            alternatives = [
                (position, *self.cast(position, arguments[position], choices, others=True))
                for position, quantization in self.inputs.items()
                if not quantization.is_packed
            ]
            ideal = self.ideal(arguments, choices)
            expected = self.expected_from(ideal, choices, alternatives, arithmetic, ties=True)
        else:
            expected = self.before_output(arguments, choices, arithmetic or self.arithmetic)
            if self.output:
                expected = self.output.expected(expected, choices[RESULT])
        return (
            expected if self._is_finite(arguments) else self._around_non_finite(expected, arguments)
        )

    def _is_finite(self, arguments: Sequence[Any]) -> bool:
        known = self._of(arguments)
        if known.is_finite is None:
            sources = [self._doubled(argument) for argument in arguments]
            known.is_finite = all(are_finite(x) for x in sources if isinstance(x, Tensor))
        return known.is_finite

    def derive_from(self, whole: Sequence[Any], variant: DerivedInput, result: Tensor) -> None:
        """Keep that an input gives entries of the result of another, if rows are independent."""
        if variant.cut is not None and (dim := variant.cut[0].output) is not None:
            entries = variant.cut[1]
        elif variant.relation in ("strided", "transposed") and result.dim():
            dim, entries = 0, torch.arange(len(result))
        else:
            return
        self._of(variant.arguments).cut = self._of(whole).cut = EntriesOf(whole, dim, entries)

    def part_of(self, values: Tensor, arguments: Sequence[Any], choices: Choices) -> Tensor | None:
        """Return the entries of a result that arguments cut from others give; None of others."""
        cut = self._of(arguments).cut
        if cut is None or cut.whole is arguments:
            return None
        whole, part = (
            self.before_output(side, choices, self.arithmetic).values
            for side in (cut.whole, arguments)
        )
        if values.shape != whole.shape or not are_independent(whole, part, cut.dim, cut.entries):
            return None
        return values.index_select(cut.dim, cut.entries.to(values.device))

    def before_output(
        self, arguments: Sequence[Any], choices: Choices, arithmetic: str
    ) -> Expected:
        """Return the expected result before it is quantized, measured once for each input.

        The noise of rows that are computed alone is that of the same rows among others.
        """
        key = id(arguments), tuple(choices.values()), arithmetic
        if key in self._measured:
            return self._measured[key][0]
        cut = self._of(arguments).cut
        like = self.under(choices).like
        values = None if self.inputs or self.stages else self._of(arguments).unquantized
        if values is None:
            values = evaluate(like, self.ideal(arguments, choices))
        expected = None
        if cut is not None and cut.whole is not arguments:
            whole = self.before_output(cut.whole, choices, arithmetic)
            if are_independent(whole.values, values, cut.dim, cut.entries):
                part = whole.select(cut.dim, cut.entries)
                expected = Expected.around(values, part.width, part.sigma)
                self._of(arguments).is_independent = True
        if expected is None:
            ideal = self.ideal(arguments, choices)
            expected = expect(like, ideal, arithmetic=arithmetic, values=values)
        if expected.values.numel() <= MOST_KEPT or (cut is not None and cut.whole is arguments):
            self._measured[key] = expected, arguments
        return expected

    def expected_from(
        self,
        values: Sequence[Any],
        choices: Choices,
        alternatives: Sequence[tuple[Any, ...]] = (),
        arithmetic: str | None = None,
        *,
        ties: bool = False,
    ) -> Expected:
        """Return the expected result of arguments that are quantized already."""
        expected = expect(
            self.under(choices).like, values, alternatives=alternatives,
            arithmetic=arithmetic or self.arithmetic, stage_ties=ties,
        )  # fmt: skip
        return self.output.expected(expected, choices[RESULT]) if self.output else expected

    def around(self, expected: Expected, choices: Choices, exact: Expected) -> Expected:
        """Return bounds of values before the result is quantized, free where `exact` is."""
        if self.output:
            expected = self.output.expected(expected, choices[RESULT])
        return replace(expected, free=exact.free, reach=exact.reach)

    def scales(self, arguments: Sequence[Any], choices: Choices) -> dict[int, Tensor]:
        """Return the scale of each element of arguments that are codes times scales."""
        scales = {}
        for position, quantization in self.inputs.items():
            of = quantization.scales(arguments[position], choices[position])
            if of is not None:
                scales[position] = of
        return scales

    def depends_on_dtype(self, arguments: Sequence[Any], choices: Choices) -> bool:
        """Return True if the reference in float32 lies outside the bounds of that in float64.

        Rows that are independent of others were looked at among them.
        """
        bounds = self.before_output(arguments, choices, "float32")
        if self._of(arguments).is_independent:
            return False
        ideal = self.ideal(arguments, choices)
        like = with_held_codes(self.under(choices).like, ideal)
        single = evaluate(like, ideal, torch.float32)
        return bool((bounds.outside(single) & bounds.values.isfinite()).any())

    def _around_non_finite(self, expected: Expected, arguments: Sequence[Any]) -> Expected:
        """Leave free what the definition poisons beyond the elements that must not be finite.

        How far a NaN spreads among the elements that depend on it is free as well: a norm of a row
        with Inf may hold zeros or NaN. So is what the reference makes a NaN of an Inf. Where all
        later entries depend on it, real code multiplies earlier ones of its tile by 0: NaN, too.
        """
        poisoned = ~self.unquantized(arguments).isfinite()
        free = poisoned & ~expected.values.isnan() | expected.values.isnan() & ~poisoned
        sources = [widened(source_of(argument)) for argument in arguments]
        if not any(isinstance(s, Tensor) and bool(s.isnan().any()) for s in sources):
            free |= expected.values.isnan()
        reach = poisoned | ~expected.values.isfinite()
        if not bool(reach.any()):
            return replace(expected, free=free)
        reach |= entries_before(poisoned)
        return replace(expected, free=free, reach=reach | self._dependent(arguments))

    def _dependent(self, arguments: Sequence[Any]) -> Tensor:
        """Return the elements of the reference's result that change with the non-finite ones."""
        sides = [
            self.unquantized(
                [
                    value.nan_to_num(number, number, number)
                    if is_wide_float(value) and not bool(value.isfinite().all())
                    else value
                    for value in arguments
                ]
            )
            for number in (0.0, 1.0)
        ]
        return sides[0] != sides[1]

    def run(self, arguments: Sequence[Any], name: str = "") -> Tensor:
        """Call the kernel; arguments that it changes in place are restored, and listed.

        An exception of the kernel becomes a KernelRefusal, but for that of a lost device.
        """
        passed: list[Any] = []
        for position, argument in enumerate(arguments):
            quantization = self.inputs.get(position)
            value = argument
            if quantization and quantization.is_packed and isinstance(argument, Tensor):
                value = quantization.pack(argument)
            if position in self.pack:
                packed = self.pack[position](value)
                passed += packed if isinstance(packed, tuple) else [packed]
            else:
                passed.append(value)
        tensors = [value for value in (*arguments, *passed) if isinstance(value, Tensor)]
        tensors = list({id(value): value for value in tensors}.values())
        copies = [value.clone() for value in tensors]
        changed: list[Tensor] = []
        began = time.perf_counter()
        try:
            with watched(name or "a further input"):
                returned = self.kernel(*passed)
                result = returned if self.unpack is None else self.unpack(returned)
                if isinstance(result, Tensor):
                    result = without_subclass(result).clone()
                # The first that waits for the kernel.
                for tensor, copy in zip(tensors, copies, strict=True):
                    if not same_bits(tensor, copy):
                        tensor.copy_(copy)
                        changed.append(tensor)
        except Exception as error:
            if lost_device(error):  # no refusal of this input
                raise (device_error(error, self.name) or error) from None
            raise KernelRefusal(str(error)) from error
        self.paces.append((time.perf_counter() - began) / max(size_of(arguments), 1))
        self.in_place.clear()
        for position, argument in enumerate(arguments):
            if any(argument is tensor for tensor in changed):
                self.in_place[position] = shares_memory(returned, argument)
        if self._of(arguments).gave(returned, self.exact, tensors):
            raise ReferenceResult(f"{self.name} returns a result of the reference")
        return self._tensor(result)

    def _tensor(self, result: Any) -> Tensor:
        if isinstance(result, Encoded):
            return result.decode(torch.float32)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            kind = f"{result.dtype} codes" if isinstance(result, Tensor) else type(result).__name__
            raise UnusableResult(
                f"{self.name} returned {kind}; give unpack= with a function that makes the tensor "
                "of values to check from it.",
                kind,
            )
        if reason := unreadable(result):
            raise UnusableResult(f"{self.name} returned {reason}", reason.partition(";")[0])
        return result.detach()


def source_of(argument: Any) -> Any:
    """Return an argument as the values that it stands for."""
    return argument.decode(torch.float64) if isinstance(argument, Encoded) else argument
