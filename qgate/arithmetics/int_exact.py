"""Products of integers of 8 bits, whose sums of 32 bits are exact in any order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.arithmetics.products import KnownProduct


@dataclass(frozen=True)
class IntProduct(KnownProduct):
    """Exact products; sums beyond 32 bits wrap around."""

    def sums(
        self, a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, torch.dtype], splits: int = 1
    ) -> Tensor:
        del dtypes, splits
        # Exact in float64: sums of products of 16 bits stay below 2**53 for any K.
        return (a.double() @ b.double().mT).long().int()


KNOWN = (IntProduct("int-exact", "exact sums of integers", (torch.int8, torch.uint8)),)
