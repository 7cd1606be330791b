"""A kernel's subject made of what a user declares, each option checked."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qgate.causes.faults import Function
from qgate.errors import first_line
from qgate.expected.narrow_floats import is_narrow
from qgate.expected.noise import ARITHMETICS
from qgate.formats import Encoded
from qgate.kernel_checks.declared import by_position, declare
from qgate.kernel_checks.subject import KernelSubject
from qgate.tensor_inputs import valueless


def make_subject(
    kernel: Function,
    arguments: Sequence[Any],
    *,
    like: Function,
    inputs: Mapping[int, Any] | Sequence[Any] | None,
    output: Any,
    pack: dict[int, Function] | None,
    unpack: Function | None,
    arithmetic: str,
    convention: str | None,
) -> KernelSubject:
    """Check what was declared of a kernel; ValueError says what cannot be used."""
    for name, function in (("kernel", kernel), ("like", like)):
        if not callable(function):
            problem = f"{function!r}; give a function of the arguments."
            if isinstance(function, Tensor):
                shape = tuple(function.shape)
                problem = f"a tensor of shape {shape}; give the function, not its result."
            raise ValueError(f"{name} is {problem}")
    if arithmetic not in ARITHMETICS:
        raise ValueError(f"arithmetic {arithmetic!r} is none of {', '.join(ARITHMETICS)}.")
    declared = by_position(inputs, arguments)
    for position, argument in enumerate(arguments):
        if is_narrow(argument) and position in declared:
            raise ValueError(
                f"argument {position} is {argument.dtype} already, whose values are fixed; leave "
                f"it out of inputs={{{position}: {declared[position]!r}}}, or give the values that "
                "the kernel quantizes."
            )
        if isinstance(argument, Encoded):
            if position in declared:
                raise ValueError(
                    f"argument {position} is encoded as {argument.quantizer.format.name} already; "
                    f"leave it out of inputs={{{position}: {declared[position]!r}}}."
                )
            declared[position] = argument
    for option, mapping in (("inputs", declared), ("pack", pack or {})):
        for position in mapping:
            _check_position(option, position, arguments)
    for position, function in (pack or {}).items():
        if not callable(function):
            raise ValueError(f"pack={{{position}: {function!r}}} is no function.")
    quantized = {
        position: declare(value, f"argument {position}", arguments[position].dtype, convention)
        for position, value in declared.items()
    }
    result = None if output is None else declare(output, "output", torch.float32, convention)
    return KernelSubject(
        kernel,
        like,
        _name(kernel),
        quantized,
        result,
        dict(pack or {}),
        unpack,
        arithmetic,
    )


def _name(kernel: Function) -> str:
    name = getattr(kernel, "__name__", type(kernel).__name__)
    return "the kernel" if name == "<lambda>" else str(name)


def _check_position(option: str, position: Any, arguments: Sequence[Any]) -> None:
    usable = [
        index
        for index, argument in enumerate(arguments)
        if isinstance(argument, Encoded)
        or (isinstance(argument, Tensor) and argument.is_floating_point())
    ]
    if position not in usable:
        positions = ", ".join(map(str, usable)) or "none"
        raise ValueError(
            f"{option} names argument {position!r}; floating-point tensors stand at: {positions}."
            f"{_unlisted(arguments)}"
        )


def _unlisted(arguments: Sequence[Any]) -> str:
    """Say how arguments are given, where one list may be meant as all of them."""
    if len(arguments) == 1 and isinstance(arguments[0], list | tuple):
        return " Give arguments one by one, not as a list: check_kernel(kernel, x, w, like=...)."
    return ""


def call_like(subject: KernelSubject, arguments: Sequence[Any]) -> Tensor:
    """Evaluate the reference on the example; ValueError if it refuses."""
    try:
        values = subject.unquantized(arguments)
    except ValueError:
        raise
    except Exception as error:
        signature = ""
        with contextlib.suppress(TypeError, ValueError):
            signature = f"{inspect.signature(subject.like)}"
        raise ValueError(
            f"like={getattr(subject.like, '__name__', subject.like)!s}{signature} cannot be called "
            f"with the {len(arguments)} arguments given: {type(error).__name__}: "
            f"{first_line(error)}{_unlisted(arguments)}"
        ) from error
    if reason := valueless(values):
        raise ValueError(f"the reference function returned {reason}")
    return values
