"""Means that a kernel takes otherwise before it quantizes, such as the smoothing of K."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qgate.causes.faults import Fault, Function
from qgate.expected.dispatching import DispatchMode
from qgate.expected.noise import evaluate
from qgate.expected.stages import QUANTIZED, StagedFunction

MEAN = torch.ops.aten.mean.dim
OtherMean = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class StageMean:
    """A mean of a reference: of its number, over these dimensions of so many, before a stage."""

    number: int
    dims: tuple[int, ...]
    count: int
    stage: str

    def words(self) -> str:
        """Say over which dimensions it is."""
        return f"dimension{'s' if len(self.dims) > 1 else ''} {', '.join(map(str, self.dims))}"


def smoothing_faults(like: StagedFunction, ideal: Sequence[Any]) -> Iterator[Fault[Function]]:
    """List the means before stages left out, over other dimensions, or of fewer entries."""
    listing = _Means(like)
    with listing:
        evaluate(like, ideal)
    for mean in listing.means:
        for words, change in _other_means(mean):
            yield Fault(words, _changed(like, mean, change))


def _other_means(mean: StageMean) -> Iterator[tuple[str, OtherMean]]:
    before, own = f"before stage {mean.stage}", mean.dims
    yield f"the mean over {mean.words()} {before} is left out", lambda x: 0 * _mean(x, own)
    every = tuple(range(mean.count))
    for dims in (dims for dims in (*((dim,) for dim in every), every) if dims != own):
        over = "all dimensions" if len(dims) > 1 else f"dimension {dims[0]}"
        yield f"the mean {before} is over {over}, not {mean.words()}", partial(_mean, dims=dims)
    yield (
        f"the mean {before} is of the first half of {mean.words()} alone",
        lambda x: _mean(x.narrow(own[0], 0, max(x.shape[own[0]] // 2, 1)), own),
    )


def _mean(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.mean(dims, keepdim=True)


def _changed(like: StagedFunction, mean: StageMean, change: OtherMean) -> Function:
    def faulty(*arguments: Any) -> Any:
        with _ChangedMean(mean, change):
            return like(*arguments)

    return faulty


class _Means(DispatchMode):
    """List the means with kept dimensions that come before a cast."""

    def __init__(self, like: StagedFunction) -> None:
        super().__init__()
        self.like = like
        self.seen = 0
        self.waiting: list[tuple[int, tuple[int, ...], int]] = []
        self.means: list[StageMean] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is MEAN and len(args) > 2 and args[2]:
            dims = tuple(sorted(dim % args[0].dim() for dim in args[1]))
            self.waiting.append((self.seen, dims, args[0].dim()))
            self.seen += 1
        elif function is QUANTIZED:
            self.means += [StageMean(*mean, self.like.last.names[-1]) for mean in self.waiting]
            self.waiting.clear()
        return function(*args, **(kwargs or {}))


class _ChangedMean(DispatchMode):
    """Replace one mean of a reference."""

    def __init__(self, mean: StageMean, change: OtherMean) -> None:
        super().__init__()
        self.mean, self.change, self.seen = mean, change, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is MEAN and len(args) > 2 and args[2]:
            self.seen += 1
            if self.seen == self.mean.number + 1:
                return self.change(args[0])
        return function(*args, **(kwargs or {}))
