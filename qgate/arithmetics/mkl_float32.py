"""Products of float32 by MKL on a CPU with AVX2: chains of multiply-adds over runs of K.

Fitted to torch 2.13, at 16 to 256 rows and columns; for 8 by 8 MKL takes another way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.arithmetics.float32 import added_in_order, fma_chain
from qgate.arithmetics.products import KnownProduct, runs

_LONGEST = 192


@dataclass(frozen=True)
class MKLProduct(KnownProduct):
    """Chains over runs of 192 places of K, or over two halves if K has at most twice as many."""

    def splits(self, depth: int) -> tuple[int, ...]:
        """List the one number of parts that MKL takes."""
        return (len(_runs(depth)),)

    def sums(
        self, a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, torch.dtype], splits: int = 1
    ) -> Tensor:
        """Return float32 sums; MKL alone decides on the parts."""
        del dtypes, splits
        return mkl_product(a, b)


def mkl_product(a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """Return the products of `a` [..., M, K] and `b` [..., N, K], added to `start`."""
    parts = [fma_chain(a[..., run], b[..., run]) for run in _runs(a.shape[-1])]
    return added_in_order(parts if start is None else [start, *parts])


def _runs(depth: int) -> list[slice]:
    length = math.ceil(depth / 2) if _LONGEST < depth <= 2 * _LONGEST else _LONGEST
    return runs(depth, length, math.ceil(depth / length) or 1)


KNOWN = (MKLProduct("cpu-mkl-float32", "float32 of MKL on a CPU", (torch.float32,)),)
