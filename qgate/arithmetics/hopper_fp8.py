"""FP8 products of Hopper (wgmma, cuBLAS), with fast and with promoted accumulation.

Facts and parameters after mmaemu 0.1.0 (Apache-2.0) and Khattak and Mikaitis (arXiv 2512.07004);
all recorded calls of an H200 have the same bits.
"""

from __future__ import annotations

import torch

from qgate.arithmetics.products import TensorCoreProduct
from qgate.arithmetics.tensor_core import TensorCore

CORE = TensorCore(group=32, aligned=13, fraction=13)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

KNOWN = (
    TensorCoreProduct(
        "hopper-fp8-slow", "Hopper FP8, every 128 products added in float32", _FP8, CORE, 128,
        promoted=True,
    ),
    TensorCoreProduct("hopper-fp8-fast", "Hopper FP8, fast accumulation", _FP8, CORE, 128),
)  # fmt: skip
