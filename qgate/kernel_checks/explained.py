"""Why one result of a kernel is wrong, where its arguments are at hand and no check was made."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qgate.formats.settings import QuantizerSettings
from qgate.kernel_checks.declaring import make_subject
from qgate.kernel_checks.diagnosis import diagnose
from qgate.kernel_checks.explanations import describe_wrong_cast
from qgate.kernel_checks.fitting import judge
from qgate.kernel_checks.requests import KernelRequest
from qgate.kernel_checks.runs import EXAMPLE, Failing, KernelRun
from qgate.kernel_checks.scale_factors import FACTOR, describe_scale_factor
from qgate.kernel_checks.settling import settled, unexplained
from qgate.kernel_checks.subject import KernelSubject
from qgate.models.refusals import LENGTH_REFUSALS

FEW_ROWS = 16
"""Rows that a fault is looked for in first: most faults are in every row."""
UNNAMED = "is wrong"


@dataclass(frozen=True)
class CodeCall:
    """One call of code: its arguments with a name for each, and what it should give.

    code    the function under test, which takes the arguments
    like    the reference function
    inputs  quantizers of arguments by position
    output  quantizer of the result
    """

    arguments: Sequence[Tensor]
    names: Sequence[str]
    code: Callable[..., Tensor]
    like: Callable[..., Any]
    inputs: Mapping[int, QuantizerSettings]
    output: QuantizerSettings | None = None

    def fault(
        self, known: Collection[str] = (), *, searches: bool = True, names: bool = True
    ) -> str:
        """Say what is wrong with the result in words; empty if correct code may give it.

        known     faults of other calls of the code, which are tried first
        searches  True if all others are tried as well
        names     False if it is enough to know that something is wrong
        """
        subject = make_subject(
            self.code,
            self.arguments,
            like=self.like,
            inputs=dict(self.inputs),
            output=self.output,
            pack=None,
            unpack=None,
            arithmetic="float32",
            convention=None,
        )
        actual = self.code(*self.arguments).detach()
        run = KernelRun(EXAMPLE, list(self.arguments), actual)
        if known and (words := self._known_fault(subject, run, known)):
            return words
        if not searches:
            return ""
        judgement = judge(subject, [run], KernelRequest())
        if not judgement.failing:
            return ""
        if not names:
            return UNNAMED
        return self._named(diagnose(settled(unexplained(judgement)[0])))

    def _known_fault(self, subject: KernelSubject, run: KernelRun, known: Collection[str]) -> str:
        choices = dict.fromkeys(subject.slots, 0)
        expected = subject.expected(run.arguments, choices)
        wrong = expected.outside(run.actual)
        if not bool(wrong.any()):
            return ""
        case = Failing(subject, choices, run.name, run.arguments, run.actual, expected, wrong)
        words = describe_wrong_cast(case, lambda words: self._named(words) in known)[0]
        if not words and FACTOR in " ".join(known):
            words = describe_scale_factor(case)
        return self._named(words)

    def _named(self, words: str) -> str:
        """Return words with the names of arguments in the place of their positions."""

        def all_named(match: re.Match[str]) -> str:
            listed = [self.names[int(number)] for number in re.findall(r"\d+", match[0])]
            return f"{', '.join(listed[:-1])} and {listed[-1]}"

        words = re.sub(r"arguments \d+(?:, \d+)*(?: and \d+)?", all_named, words)
        return re.sub(r"argument (\d+)", lambda match: self.names[int(match[1])], words)


@torch.no_grad()
def module_fault(
    reference: nn.Module,
    actual: nn.Module,
    x: Tensor,
    quantizers: Mapping[str, QuantizerSettings],
    known: Collection[str] = (),
    *,
    searches: bool = True,
    names: bool = True,
) -> str:
    """Say what a module does wrong beside another one whose input, weight, output are quantized.

    `known` are faults of other modules, which are tried first. The module under test has its own
    parameters: a function that changes them refuses.
    """
    named = floating_state(reference)
    values = list(named.values())

    def called(x: Tensor, *parameters: Tensor) -> Any:
        return functional_call(reference, dict(zip(named, parameters, strict=True)), (x,))

    # Of the module itself, five times as long for each of thousands of faults that are tried.
    like = nn.functional.linear if type(reference) is nn.Linear else called

    def code(x: Tensor, *parameters: Tensor) -> Tensor:
        if not all(map(torch.equal, parameters, values)):
            raise ValueError("the module under test has parameters of its own")
        result: Tensor = actual(x)
        return result

    inputs = {0: quantizers["input"]} if "input" in quantizers else {}
    inputs |= {
        number: quantizers[name] for number, name in enumerate(named, 1) if name in quantizers
    }
    titles = ["its input", *(f"its {name}" for name in named)]
    for some in _inputs(x, isinstance(reference, nn.Linear)):
        call = CodeCall([some, *values], titles, code, like, inputs, quantizers.get("output"))
        try:
            if words := call.fault(known, searches=searches, names=names):
                return words
        except LENGTH_REFUSALS:
            if some is x:
                raise
    return ""


def _inputs(x: Tensor, are_rows: bool) -> Iterator[Tensor]:
    """Yield the first rows of an input, as a matrix if it is made of rows, and then the whole."""
    few = x.reshape(-1, x.shape[-1]) if are_rows else x
    for dim in range(few.dim() - 1):
        few = few.narrow(dim, 0, min(FEW_ROWS if dim == few.dim() - 2 else 1, few.shape[dim]))
    if few.shape != x.shape:
        yield few.contiguous()
    yield x


def floating_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module that are floating-point numbers, by name."""
    state = (*module.named_parameters(), *module.named_buffers())
    return {name: value.detach() for name, value in state if value.is_floating_point()}
