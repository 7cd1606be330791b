"""Operators that are taken for others: sums for products, other positions, other statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qgate.causes.operator_calls import Call, CallFault

WRAPS = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Positions after which a kernel may count anew."""
UNITS = {"half": 0.5, "twice": 2.0, "a quarter of": 0.25, "pi / 180 times": math.radians(1)}
"""Sizes of the steps in which positions may be counted, where one is right."""
FINITE = (-1.0, -10.0, -100.0, -1e3, -1e4)
"""What scores may be masked with, where minus infinity is right."""
_BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu, "gelu": functional.gelu, "relu": torch.relu, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "exp": torch.exp,
}  # fmt: skip
_IN_PLACE_OF: dict[str, tuple[tuple[str, Callable[[Any, Any], Tensor]], ...]] = {
    "mul": (("added", lambda x, y: x + y), ("divided", lambda x, y: x / y)),
    "add": (("multiplied", lambda x, y: x * y), ("subtracted", lambda x, y: x - y)),
    "sub": (("added", lambda x, y: x + y),),
    "div": (("multiplied", lambda x, y: x * y),),
}
_RIGHT_WORDS = {"mul": "multiplied", "add": "added", "sub": "subtracted", "div": "divided"}


def exchange_faults(call: Call) -> Iterator[CallFault]:
    """List operators in the place of others, and what others are computed of."""
    name, args = call.name, call.args
    if name in _IN_PLACE_OF and call.is_float and len(args) == 2 and not call.kwargs:
        yield from _of_operands(call)
    elif name == "arange" and call.result.dim() == 1 and call.result.numel() > 2:
        yield from _of_positions(call.result)
    elif name == "pow" and isinstance(args[0], int | float) and call.result.numel() > 2:
        yield CallFault("the powers are in reverse order", result=lambda _, own: own.flip(-1))
    elif name in ("sin", "cos") and call.is_float:
        left = "zero" if name == "sin" else "one"
        yield CallFault(
            f"{name} is left out: taken as {left}",
            result=lambda _, own, value=float(name == "cos"): torch.full_like(own, value),  # type: ignore[misc]
        )
    elif name in ("mean", "sum") and call.is_float and isinstance(args[0], Tensor):
        yield from _of_rows(name, args)
    elif name in ("rsqrt", "sqrt") and call.is_float and args[0].dim() > 1:
        yield from _of_neighbors(args[0])
    elif name == "_softmax" and call.is_float:
        yield from _of_softmax(args[0], args[1])
    elif name in ("masked_fill", "where") and call.is_float:
        yield from _of_masks(call.result)


def _of_operands(call: Call) -> Iterator[CallFault]:
    """List another operator of two sides, and an activation of the other or of both."""
    first, second = call.args
    for words, do in _IN_PLACE_OF[call.name]:
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            operand = call.makers.words(second)
            yield CallFault(
                f"{operand} is {words}, not {_RIGHT_WORDS[call.name]}",
                result=lambda a, own, do=do: _shaped(do(a[0], a[1]), own),  # type: ignore[misc]
            )
    if call.name != "mul":
        return
    for position, other in ((0, second), (1, first)):
        maker = call.made(position)
        if maker is None or maker.name not in _BEFORE or not maker.args:
            continue
        if not isinstance(other, Tensor):
            continue
        x, activation, operand = maker.args[0], _BEFORE[maker.name], call.makers.words(other)
        yield CallFault(
            f"{maker.name} comes after the multiplication by {operand}, not before it",
            result=lambda _, own, x=x, other=other, f=activation: _shaped(f(x * other), own),  # type: ignore[misc]
        )
        yield CallFault(
            f"{maker.name} is computed of {operand}, too",
            result=lambda _, own, x=x, other=other, f=activation: _shaped(f(x) * f(other), own),  # type: ignore[misc]
        )
        yield CallFault(
            f"{maker.name} is computed of {operand} instead",
            result=lambda _, own, x=x, other=other, f=activation: _shaped(x * f(other), own),  # type: ignore[misc]
        )


def _shaped(value: Tensor, own: Tensor) -> Tensor:
    return value if value.shape == own.shape else own


def _of_positions(positions: Tensor) -> Iterator[CallFault]:
    steps = positions.diff()
    is_count = bool((steps == 1).all())
    which = "positions are" if is_count else f"numbers in steps of {float(steps[0]):g} are"
    yield CallFault(f"{which} in reverse order", result=lambda _, own: own.flip(0))
    if not is_count:
        return
    for words, unit in UNITS.items():
        yield CallFault(
            f"positions are {words} what they should be",
            result=lambda _, own, unit=unit: own.double() * unit,  # type: ignore[misc]
        )
    for count in (count for count in WRAPS if count < positions.numel()):
        yield CallFault(
            f"positions begin anew after {count}",
            result=lambda _, own, count=count: own % count,  # type: ignore[misc]
        )
        half = count // 2
        yield CallFault(
            f"positions wrap at {half}: {half} becomes {-half}",
            result=lambda _, own, half=half: (own + half) % (2 * half) - half,  # type: ignore[misc]
        )


def _of_rows(name: str, args: Sequence[Any]) -> Iterator[CallFault]:
    """List sums and means of other entries: of all rows, of half of each, of every second entry."""
    x = args[0]
    dims = args[1] if len(args) > 1 and args[1] is not None else []
    dims = [dims] if isinstance(dims, int) else list(dims)
    if len(dims) != 1 or x.dim() < 1:
        return
    dim, count = dims[0] % x.dim(), x.shape[dims[0]]
    does = "a mean" if name == "mean" else "a sum"
    if name == "mean" and x.dim() > 1:
        yield CallFault(
            "a mean is that of all rows, not of each",
            result=lambda a, own: _of_all(a[0], dim, own),
        )
    if count < 4:
        return
    half = count // 2
    for words, index in (
        (f"entries 0 to {half - 1}", slice(0, half)),
        (f"entries {half} to {count - 1}", slice(half, None)),
        ("every second entry", slice(0, None, 2)),
    ):
        yield CallFault(
            f"{does} over {count} is that of {words} alone",
            result=lambda a, own, index=index: _of_some(a[0], name, dim, index).reshape(own.shape),  # type: ignore[misc]
        )


def _of_all(x: Tensor, dim: int, own: Tensor) -> Tensor:
    """Return means of the last two dimensions where those of one are meant."""
    means = x.mean(dim, keepdim=True)
    other = next(d for d in reversed(range(x.dim())) if d != dim)
    return means.mean(other, keepdim=True).expand_as(means).reshape(own.shape)


def _of_some(x: Tensor, name: str, dim: int, index: slice) -> Tensor:
    chosen = x.movedim(dim, -1)[..., index]
    return chosen.mean(-1) if name == "mean" else chosen.sum(-1)


def _of_neighbors(x: Tensor) -> Iterator[CallFault]:
    """List roots of the row before or after."""
    rows = next((d for d in reversed(range(x.dim())) if x.shape[d] > 1), None)
    if rows is None:
        return
    for step, words in ((1, "before"), (-1, "after")):
        yield CallFault(
            f"a root is that of the row {words}",
            result=lambda _, own, step=step: own.roll(step, rows),  # type: ignore[misc]
        )


def _of_softmax(scores: Tensor, dim: int) -> Iterator[CallFault]:
    if scores.dim() > 1 and dim in (-1, scores.dim() - 1):
        yield CallFault(
            "the softmax is over the rows of scores, not over their columns",
            result=lambda a, _: a[0].softmax(-2).nan_to_num(),
        )
    yield CallFault(
        "1 is added to the sum of the softmax",
        result=lambda a, _: torch.exp(
            a[0]
            - torch.logaddexp(a[0].logsumexp(-1, keepdim=True), torch.zeros_like(a[0][..., :1]))
        ),
    )


def _of_masks(scores: Tensor) -> Iterator[CallFault]:
    """List finite numbers in the place of minus infinity."""
    if not bool((scores == -math.inf).any()):
        return
    for number in FINITE:
        yield CallFault(
            f"hidden scores are masked with {number:g}, not with minus infinity",
            result=lambda _, own, number=number: own.masked_fill(own == -math.inf, number),  # type: ignore[misc]
        )
