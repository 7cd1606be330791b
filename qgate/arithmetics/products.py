"""A matrix product in a known arithmetic, and the parts that K may be cut into."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qgate.arithmetics.float32 import added_in_order
from qgate.arithmetics.tensor_core import TensorCore, chain

# More parts than these were not seen where tiles are long.
_MOST_SPLITS = 6


@dataclass(frozen=True)
class KnownProduct:
    """One arithmetic of matrix products.

    name          how a user asks for it
    words         how a report says it
    operands      the dtypes of operands that it is for
    rounds_parts  True if sums of parts of K are rounded to 16 bits
    any_order     True if sums may be added in any order, so that they have float noise
    """

    name: str
    words: str
    operands: tuple[torch.dtype, ...]
    rounds_parts: bool = field(default=False, kw_only=True)
    any_order: bool = field(default=False, kw_only=True)

    def takes(self, a: torch.dtype, b: torch.dtype) -> bool:
        """Return whether operands of these dtypes may be multiplied in this arithmetic."""
        return a in self.operands and b in self.operands

    def splits(self, depth: int) -> tuple[int, ...]:
        """List numbers of parts that K may be cut into, likeliest first, each partition once."""
        del depth
        return (1,)

    @abstractmethod
    def sums(
        self, a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, torch.dtype], splits: int = 1
    ) -> Tensor:
        """Return what the accumulators hold [..., M, N]: float32, of integers int32.

        `a` [..., M, K] and `b` [..., N, K] hold exact values of `dtypes`, in any dtype.
        """

    def with_splits(self, splits: int) -> str:
        """Return the words of a report, with the cut of K if there is one."""
        return self.words if splits == 1 else f"{self.words}, K split {splits} ways"


@dataclass(frozen=True)
class TensorCoreProduct(KnownProduct):
    """Products by a tensor core; parts are runs of whole tiles, whose sums are added in float32.

    tile        places of K that are never cut apart
    promoted    every tile is a chain of its own, added to the others in float32
    """

    core: TensorCore
    tile: int
    promoted: bool = False

    def splits(self, depth: int) -> tuple[int, ...]:
        return distinct_splits(depth, self.tile, self.likely_splits(depth))

    def likely_splits(self, depth: int) -> tuple[int, ...]:
        """List numbers of parts, likeliest first; cuBLAS gives a part some 2,730 bytes of K."""
        likely = depth * self.operands[0].itemsize // 2730
        return (likely, *range(1, _MOST_SPLITS + 1))

    def sums(
        self, a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, torch.dtype], splits: int = 1
    ) -> Tensor:
        if not self.promoted:
            lots = runs(a.shape[-1], self.tile, splits)
            return added_in_order(self.chain(a[..., run], b[..., run], dtypes) for run in lots)
        ends = [
            self.chain(a[..., tile], b[..., tile], dtypes)
            for tile in runs(a.shape[-1], self.tile, math.ceil(a.shape[-1] / self.tile))
        ]
        return added_in_order(
            added_in_order(ends[run]) for run in runs(len(ends), 1, splits)
        )  # fmt: skip

    def chain(self, a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, torch.dtype]) -> Tensor:
        """Return the accumulators of one chain over all of K."""
        return chain(self.core, a, b, dtypes)


def runs(depth: int, tile: int, splits: int) -> list[slice]:
    """Cut K into runs of as many whole tiles each, of which the last may be shorter."""
    tiles = math.ceil(depth / tile)
    length = max(math.ceil(tiles / splits), 1) * tile
    return [slice(k, k + length) for k in range(0, max(depth, 1), length)]


def distinct_splits(depth: int, tile: int, candidates: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of parts that candidates lead to, each once, in their order."""
    numbers = [len(runs(depth, tile, max(parts, 1))) for parts in candidates]
    return tuple(dict.fromkeys(numbers))
