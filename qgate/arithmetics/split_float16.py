"""Products of fp16 whose parts of K are rounded to fp16 before they are added.

cuBLAS does so where torch allows reduced-precision reductions, which is the default: on an H200 in
`linear` of fp16 at K = 8192. Sums of a part are exact here but for their last rounding; the parts
are added in float32. bf16 is left out on purpose: one rounding of a part costs 0.4 % there, which
was reported as a defect (modular/modular#7165).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.arithmetics.float32 import added_in_order
from qgate.arithmetics.products import KnownProduct, distinct_splits, runs

_TILE = 64
_MOST = 8


@dataclass(frozen=True)
class RoundedParts(KnownProduct):
    """Products in parts, each rounded to the dtype of the operands."""

    def splits(self, depth: int) -> tuple[int, ...]:
        """List 2 to 8 parts; one part, which is an exact sum, comes last."""
        return distinct_splits(depth, _TILE, (*range(2, _MOST + 1), 1))

    def sums(
        self, a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, torch.dtype], splits: int = 1
    ) -> Tensor:
        wide_a, wide_b = a.double(), b.double()
        return added_in_order(
            (wide_a[..., part] @ wide_b[..., part].mT).float().to(dtypes[0]).float()
            for part in runs(a.shape[-1], _TILE, splits)
        )


KNOWN = (
    RoundedParts(
        "split-float16", "parts of K rounded to float16 before they are added", (torch.float16,),
        rounds_parts=True,
    ),
)  # fmt: skip
