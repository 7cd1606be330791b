"""Functions whose entries meet others: heads in another order, pairs for halves, late arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qgate.causes.faults import Function, WrongCall


def regroupings(like: Function, arguments: Sequence[Any], result: Tensor) -> Iterator[WrongCall]:
    """List functions that take some arguments in another order, and give the result back in it."""
    yield from _of_heads(like, arguments, result)
    yield from _of_pairs(like, arguments, result)


def _of_heads(like: Function, arguments: Sequence[Any], result: Tensor) -> Iterator[WrongCall]:
    """List heads that several others share, repeated one after the other or each in turn."""
    tensors = [(p, x) for p, x in enumerate(arguments) if isinstance(x, Tensor)]
    for position, x in tensors:
        for dim in range(min(x.dim(), result.dim())):
            count = x.shape[dim]
            shared = [
                (other, y.shape[dim])
                for other, y in tensors
                if y.dim() == x.dim() and 1 < y.shape[dim] < count and count % y.shape[dim] == 0
            ]
            if not shared or result.shape[dim] != count:
                continue
            few = shared[0][1]
            order = torch.arange(count).reshape(few, -1).T.reshape(-1)
            listed = ", ".join(str(other) for other, _ in shared)
            ways = f"entry i % {few}", f"entry i // {count // few}"
            for index, (wrong, right) in ((order, ways), (order.argsort(), ways[::-1])):
                yield _regrouped(
                    like, arguments, [position], dim, index,
                    f"entry i of dimension {dim} of argument {position} meets {wrong} of "
                    f"{'arguments' if len(shared) > 1 else 'argument'} {listed}, not {right} "
                    "(repeat for repeat_interleave)",
                )  # fmt: skip


def _of_pairs(like: Function, arguments: Sequence[Any], result: Tensor) -> Iterator[WrongCall]:
    """List pairs that are neighbors in place of being half a row apart, as rotations have them."""
    for position, x in enumerate(arguments):
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape != result.shape:
            continue
        length = x.shape[-1] if x.dim() else 0
        if length < 4 or length % 2:
            continue
        halves = torch.arange(length).reshape(-1, 2).T.reshape(-1)
        for index, (wrong, right) in (
            (halves, ("neighbors (interleaved)", "half a row apart")),
            (halves.argsort(), ("half a row apart", "neighbors (interleaved)")),
        ):
            words = f"pairs of argument {position} are {wrong}, and should be {right}"
            yield _regrouped(like, arguments, [position], -1, index, words)
            alike = [
                other
                for other, y in enumerate(arguments)
                if isinstance(y, Tensor) and y.dim() and y.shape[-1] == length
            ]
            if len(alike) > 1:
                yield _regrouped(like, arguments, alike, -1, index, words)


def _regrouped(
    like: Function, arguments: Sequence[Any], positions: list[int], dim: int, index: Tensor,
    words: str,
) -> WrongCall:  # fmt: skip
    changed = list(arguments)
    for position in positions:
        changed[position] = changed[position].index_select(dim, index.to(changed[position].device))

    def faulty(*values: Any) -> Any:
        result = like(*values)
        return result.index_select(dim, index.argsort().to(result.device))

    return WrongCall(words, faulty, changed)


def late_arguments(like: Function, arguments: Sequence[Any], result: Tensor) -> Iterator[WrongCall]:
    """List arguments that are added to the result, or multiply it, in place of what is inside."""
    for position, x in enumerate(arguments):
        if not isinstance(x, Tensor) or not x.is_floating_point() or len(arguments) < 2:
            continue
        try:
            fits = torch.broadcast_shapes(x.shape, result.shape) == result.shape
        except RuntimeError:
            fits = False
        if not fits:
            continue
        for neutral, does in ((0.0, "is added to"), (1.0, "multiplies")):
            changed = list(arguments)
            changed[position] = torch.full_like(x, neutral)

            def faulty(*values: Any, x: Tensor = x, is_sum: bool = neutral == 0) -> Any:
                result = like(*values)
                return result + x if is_sum else result * x

            yield WrongCall(
                f"argument {position} {does} the result, and not where it should be inside",
                faulty, changed,
            )  # fmt: skip
