"""Attention with sums in float32: loops of a CPU, and of Triton's interpreter."""

from __future__ import annotations

import torch

from qgate.arithmetics.attention import KnownAttention

_DTYPES = (torch.bfloat16, torch.float16)
_TILES = (0, 16, 32, 64, 96, 128, 256, 512)

KNOWN = (
    KnownAttention(
        "float32-flash", "fused attention with float32 sums", _DTYPES, _TILES, scaled_first=True
    ),
)
