"""Products of float32 outside of tensor cores: fused multiply-adds in the order of K."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.arithmetics.float32 import added_in_order, fma_chain
from qgate.arithmetics.products import KnownProduct, distinct_splits, runs


@dataclass(frozen=True)
class ChainProduct(KnownProduct):
    """Chains of fused multiply-adds; the sums of parts of K are added in order."""

    def splits(self, depth: int) -> tuple[int, ...]:
        """List numbers of parts: runs of 32 and of 64 were seen, the latter where K is long."""
        lengths = (32, 64, 128) if depth <= 1024 else (64, 32, 128)
        return distinct_splits(
            depth, 1, (*(math.ceil(depth / run) for run in lengths), *range(1, 7))
        )

    def sums(
        self, a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, torch.dtype], splits: int = 1
    ) -> Tensor:
        del dtypes
        lots = runs(a.shape[-1], 1, splits)
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        # All parts take their steps together; zeros behind the last change nothing.
        x, y = (_stacked(side.float().expand(*batch, *side.shape[-2:]), lots) for side in (a, b))
        return added_in_order(fma_chain(x, y).unbind())


def _stacked(side: Tensor, lots: list[slice]) -> Tensor:
    """Stack the runs of K, of which the last may be shorter."""
    length = lots[0].stop - lots[0].start
    padded = torch.nn.functional.pad(side, (0, len(lots) * length - side.shape[-1]))
    return padded.reshape(*side.shape[:-1], len(lots), length).movedim(-2, 0)


KNOWN = (
    ChainProduct("fma-chain", "float32 multiply-adds in the order of K", (torch.float32,)),
)  # fmt: skip
