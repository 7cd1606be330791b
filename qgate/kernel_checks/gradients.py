"""Gradients of a kernel: each one checked as a kernel of its own, whose reference is autograd's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qgate.device_errors import lost_device
from qgate.errors import first_line
from qgate.expected.narrow_floats import is_wide_float
from qgate.expected.noise import moved
from qgate.expected.operators import evaluate_changed
from qgate.expected.stages import without_stages
from qgate.kernel_checks.declared import by_position
from qgate.kernel_checks.record import CheckFailure, CheckReport
from qgate.kernel_checks.subject import KernelSubject

Function = Callable[..., Any]


class Gradient:
    """A function that returns the gradient of one argument or parameter of another function.

    It takes the arguments of the function, then parameters of a module by name, and last the
    gradient of the result. No gradient is one of zeros.
    """

    def __init__(self, function: Function, position: int, names: Sequence[str], of: str) -> None:
        self.function, self.position, self.names = function, position, names
        self.__name__ = of
        # Operators of gradients may give much larger values, which cancel.
        self.inside = self._moved_inside

    def __call__(self, *values: Any) -> Tensor:
        try:
            return self.found(values)
        except NoGradientError:
            return torch.zeros_like(values[self.position])

    def _moved_inside(
        self, arguments: Sequence[Any], unit: float, generator: torch.Generator
    ) -> Tensor:
        return evaluate_changed(
            self, arguments, lambda value, _site, _name: moved(value, unit, generator)
        )

    def found(self, values: Sequence[Any]) -> Tensor:
        """Return the gradient; NoGradientError where none goes through the function."""
        *arguments, outer = values
        leaves = [
            value.detach().requires_grad_() if is_wide_float(value) else value
            for value in arguments
        ]
        with torch.enable_grad():
            result = self._result(leaves)
            if not result.requires_grad:
                raise NoGradientError("its result does not require a gradient")
            (gradient,) = torch.autograd.grad(
                result, leaves[self.position], outer.to(result.dtype), allow_unused=True
            )
        if gradient is None:
            raise NoGradientError("its result does not depend on it")
        found: Tensor = gradient.detach()
        return found

    def _result(self, leaves: Sequence[Any]) -> Any:
        if not self.names:
            return self.function(*leaves)
        assert isinstance(self.function, nn.Module)
        count = len(leaves) - len(self.names)
        parameters = dict(zip(self.names, leaves[count:], strict=True))
        return functional_call(self.function, parameters, tuple(leaves[:count]))


class NoGradientError(Exception):
    """A function through which no gradient goes to an argument."""


def check_gradients(
    check: Function,
    subject: KernelSubject,
    arguments: Sequence[Any],
    result: Tensor,
    outer_format: Any,
    options: Mapping[str, Any],
    report: CheckReport,
) -> None:
    """Check the gradient of each argument, and of each parameter that both modules have.

    check         the check of a kernel, which each gradient is held by
    result        what the kernel gave for the example
    outer_format  the format in which the kernel quantizes the gradient of the result; True for none
    """
    if subject.pack or any(q.is_packed for q in subject.inputs.values()):
        raise ValueError(
            f"backward={outer_format!r} is not allowed with packed arguments, which have no "
            "gradient: check the gradients with a function of unpacked ones, or leave it out."
        )
    kernel, like = subject.kernel, without_stages(subject.like)
    names, values = _parameters(kernel, like)
    generator = torch.Generator().manual_seed(options["seed"])
    outer = torch.randn(result.shape, generator=generator).to(result.device, result.dtype)
    inputs = by_position(options["inputs"], arguments)
    count = len(arguments)
    if outer_format is not True:
        inputs[count + len(values)] = outer_format
    for position, value in enumerate([*arguments, *values]):
        if not is_wide_float(value):
            continue
        of = f"argument {position}" if position < count else f"parameter {names[position - count]}"
        sides = [
            Gradient(function, position, names, f"the gradient of {of} of {report.name}")
            for function in (kernel, like)
        ]
        try:
            sides[1].found([*arguments, *values, outer])
        except NoGradientError as error:
            report.left_out[f"the gradient of {of}"] = f"the reference has none: {error}"
            continue
        try:
            sides[0].found([*arguments, *values, outer])
        except NoGradientError as error:
            raise CheckFailure(
                f"{report.name} gives no gradient of {of}: {error}", report
            ) from None
        except Exception as error:
            if lost_device(error):
                raise
            raise CheckFailure(
                f"{report.name} raised {type(error).__name__} for the gradient of {of}: "
                f"{first_line(error)}",
                report,
            ) from error
        try:
            report.gradients[of] = check(
                sides[0],
                [*arguments, *values, outer],
                **{**options, "like": sides[1], "inputs": inputs},
            )
        except CheckFailure as failure:
            raise _advised(failure, count + len(values)) from None
        except ValueError as error:
            report.left_out[f"the gradient of {of}"] = str(error)
    if not report.gradients:
        reasons = [why for of, why in report.left_out.items() if of.startswith("the gradient of ")]
        why = reasons[0] if reasons else "no argument is a floating-point tensor"
        raise ValueError(
            f"backward={outer_format!r} checks no gradient here: {why.rstrip('.')}. Give a "
            "reference that autograd goes through, or leave backward out."
        )


def _parameters(kernel: Function, like: Function) -> tuple[list[str], list[Tensor]]:
    """Return the parameters that a module and its reference both have, with the kernel's values."""
    if not (isinstance(kernel, nn.Module) and isinstance(like, nn.Module)):
        return [], []
    theirs = {name: parameter.shape for name, parameter in like.named_parameters()}
    shared = {
        name: parameter.detach()
        for name, parameter in kernel.named_parameters()
        if theirs.get(name) == parameter.shape and is_wide_float(parameter)
    }
    return list(shared), list(shared.values())


def _advised(failure: CheckFailure, outer: int) -> CheckFailure:
    """Call the last argument the gradient of the result, and say how its format is declared."""
    cause = re.sub(rf"declare inputs=\{{{outer}: (.*)\}}$", r"declare backward=\1", failure.cause)
    details = (line.strip() for line in str(failure).splitlines()[1:])
    words = [
        re.sub(rf"\bargument {outer}\b", "the gradient of the result", line)
        for line in (cause, *details)
    ]
    return CheckFailure(words[0], failure.report, *words[1:])
