"""The memory-efficient attention of torch on CUDA, fitted to recorded calls of an H200."""

from __future__ import annotations

import torch

from qgate.arithmetics.attention import BackwardRounding, KnownAttention
from qgate.arithmetics.hopper_16bit import BY_EIGHT

KNOWN = (
    KnownAttention(
        "hopper-efficient", "memory-efficient attention", (torch.bfloat16, torch.float16),
        (64, 128, 32), BY_EIGHT, scaled_first=True,
        backward=BackwardRounding(after_scale=True, of_p=True),
    ),
)  # fmt: skip
