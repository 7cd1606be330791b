"""Products of float32 whose operands are rounded to TF32, added in float32 in any order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.arithmetics.float32 import to_tf32
from qgate.arithmetics.products import KnownProduct


@dataclass(frozen=True)
class RoundedOperands(KnownProduct):
    """Exact sums of products of operands that have the 10 fraction bits of TF32."""

    def sums(
        self, a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, torch.dtype], splits: int = 1
    ) -> Tensor:
        del dtypes, splits
        return (to_tf32(a).double() @ to_tf32(b).double().mT).float()


KNOWN = (
    RoundedOperands("tf32-operands", "operands rounded to TF32", (torch.float32,), any_order=True),
)
