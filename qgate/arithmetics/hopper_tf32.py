"""Products of float32 as TF32 on Hopper's tensor cores, fitted to recorded calls of an H200."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.arithmetics.float32 import to_tf32
from qgate.arithmetics.products import TensorCoreProduct
from qgate.arithmetics.tensor_core import TensorCore


@dataclass(frozen=True)
class TF32Product(TensorCoreProduct):
    """Products of operands that are rounded to the 10 fraction bits of TF32, ties to even."""

    def likely_splits(self, depth: int) -> tuple[int, ...]:
        """List numbers of parts: runs of 32 and of 128 were seen, the latter where K is long."""
        lengths = (32, 128, 64) if depth <= 1024 else (128, 32, 64)
        return (*(math.ceil(depth / run) for run in lengths), *range(1, 7))

    def chain(self, a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, torch.dtype]) -> Tensor:
        return super().chain(to_tf32(a), to_tf32(b), dtypes)


CORE = TensorCore(group=8, aligned=25, fraction=23)

KNOWN = (TF32Product("hopper-tf32", "Hopper TF32", (torch.float32,), CORE, 32),)
