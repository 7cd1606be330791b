"""Why one result of a kernel is wrong, where its arguments are at hand and no check was made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qgate.formats.settings import QuantizerSettings
from qgate.kernel_checks.declaring import make_subject
from qgate.kernel_checks.diagnosis import diagnose
from qgate.kernel_checks.fitting import judge
from qgate.kernel_checks.requests import KernelRequest
from qgate.kernel_checks.runs import EXAMPLE, KernelRun
from qgate.kernel_checks.settling import settled, unexplained

FEW_ROWS = 16
"""Rows that a fault is looked for in first: most faults are in every row."""


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

    def fault(self) -> str:
        """Say what is wrong with the result in words; empty if correct code may give it."""
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
        judgement = judge(subject, [run], KernelRequest())
        if not judgement.failing:
            return ""
        return self._named(diagnose(settled(unexplained(judgement)[0])))

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
) -> str:
    """Say what a module does wrong beside another one whose input, weight, output are quantized.

    The module under test has its own parameters: a function that changes them refuses.
    """
    named = floating_state(reference)
    values = list(named.values())

    def like(x: Tensor, *parameters: Tensor) -> Any:
        return functional_call(reference, dict(zip(named, parameters, strict=True)), (x,))

    def code(x: Tensor, *parameters: Tensor) -> Tensor:
        if not all(map(torch.equal, parameters, values)):
            raise ValueError("the module under test has parameters of its own")
        result: Tensor = actual(x)
        return result

    inputs = {0: quantizers["input"]} if "input" in quantizers else {}
    inputs |= {
        number: quantizers[name] for number, name in enumerate(named, 1) if name in quantizers
    }
    names = ["its input", *(f"its {name}" for name in named)]
    for few in _few_rows(x):
        call = CodeCall([few, *values], names, code, like, inputs, quantizers.get("output"))
        if words := call.fault():
            return words
    return ""


def _few_rows(x: Tensor) -> Iterator[Tensor]:
    """Yield the first rows of a tensor, and then the whole of it."""
    few = x
    for dim in range(x.dim() - 1):
        few = few.narrow(dim, 0, min(FEW_ROWS if dim == x.dim() - 2 else 1, x.shape[dim]))
    if few.shape != x.shape:
        yield few.contiguous()
    yield x


def floating_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module that are floating-point numbers, by name."""
    state = (*module.named_parameters(), *module.named_buffers())
    return {name: value.detach() for name, value in state if value.is_floating_point()}
