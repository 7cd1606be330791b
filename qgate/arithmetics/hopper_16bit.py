"""Products of bf16 and fp16 of Hopper's tensor cores, fitted to recorded calls of an H200."""

from __future__ import annotations

import torch

from qgate.arithmetics.products import TensorCoreProduct
from qgate.arithmetics.tensor_core import TensorCore

CORE = TensorCore(group=16, aligned=25, fraction=23)
BY_EIGHT = TensorCore(group=8, aligned=25, fraction=23)
"""The instruction of Ampere, which some kernels use on Hopper too."""
_DTYPES = (torch.bfloat16, torch.float16)

KNOWN = (
    TensorCoreProduct("hopper-16bit", "Hopper tensor cores of 16 bits", _DTYPES, CORE, 64),
    TensorCoreProduct(
        "hopper-16bit-by-8", "Hopper tensor cores of 16 bits, 8 products at once", _DTYPES,
        BY_EIGHT, 64,
    ),
)  # fmt: skip
