"""Reference code between two sites, written as the operators of torch that it calls."""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qgate.causes.operator_faults import SpelledAttention
from qgate.interruptions import raised_by_users

MOST_OPERATORS = 1000
"""Operators of code up to which it is written out: loops over tokens have more."""
PLACES = ("device", "pin_memory")
"""Arguments of operators that say where a tensor is made: in a script, on the CPU."""
SAME = 1e-9
"""Relative difference of what was written from the code that it was written from."""


@dataclass(frozen=True)
class TracedCode:
    """The lines of a function, the names of its arguments, and other tensors that it reads."""

    parameters: Sequence[str]
    lines: Sequence[str]
    constants: Mapping[str, Tensor]


def traced_code(
    like: Callable[..., Tensor], arguments: Sequence[Tensor], names: Sequence[str]
) -> TracedCode | None:
    """Write a function as operators; None if it looks at values, or calls others than torch's."""
    for dtype in (torch.float64, torch.float32):
        values = [argument.to(dtype) for argument in arguments]
        # A function may refuse a dtype, and tracing a function, each in its own way.
        try:
            return _written(_graph(like, values), names)
        except raised_by_users():
            continue
    return None


class _Unwritable(Exception):
    """An operator, or an argument of one, that a script could not have."""


@torch.no_grad()
def _graph(like: Callable[..., Tensor], values: Sequence[Tensor]) -> Any:
    """Trace a function, and look that the trace gives what the function gives."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def spelled(*tensors: Tensor) -> Tensor:
        with SpelledAttention():
            return like(*tensors)

    traced = make_fx(spelled)(*values)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    if not torch.allclose(traced(*values), spelled(*values), rtol=SAME, atol=0, equal_nan=True):
        raise _Unwritable
    return traced


def _written(traced: Any, argument_names: Sequence[str]) -> TracedCode:
    words: dict[Any, str] = {}
    used_names = {"aten", "tensors", "torch"}
    parameters: list[str] = []
    lines: list[str] = []
    constants: dict[str, Tensor] = {}
    if len(traced.graph.nodes) > MOST_OPERATORS:
        raise _Unwritable
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            words[node] = _identifier(argument_names[len(parameters)], used_names)
            parameters.append(words[node])
        elif node.op == "get_attr":
            key = f"constant {len(constants)}"
            constants[key] = getattr(traced, node.target).detach()
            words[node] = f"tensors[{key!r}]"
        elif node.op == "output":
            lines.append(f"return {_value(node.args[0], words)}")
        else:
            call = _call(node, words)
            words[node] = _identifier(node.name, used_names)
            lines.append(f"{words[node]} = {call}")
    return TracedCode(parameters, lines, constants)


def _identifier(name: str, used_names: set[str]) -> str:
    """Return a name of Python that nothing else has."""
    plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    plain = f"_{plain}" if not plain.isidentifier() or keyword.iskeyword(plain) else plain
    while plain in used_names:
        plain += "_"
    used_names.add(plain)
    return plain


def _call(node: Any, words: Mapping[Any, str]) -> str:
    if node.target is operator.getitem:
        whole, index = node.args
        return f"{_value(whole, words)}[{_value(index, words)}]"
    if getattr(node.target, "namespace", "") != "aten":
        raise _Unwritable
    arguments = [_value(value, words) for value in node.args]
    arguments += [
        f"{name}={_value(value, words)}"
        for name, value in node.kwargs.items()
        if name not in PLACES
    ]
    return f"{node.target}({', '.join(arguments)})"


def _value(value: Any, words: Mapping[Any, str]) -> str:
    """Write an argument of an operator."""
    if isinstance(value, torch.fx.Node):
        return words[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(_value(part, words) for part in value)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    raise _Unwritable
