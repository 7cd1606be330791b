"""FlashAttention and cuDNN's attention on Hopper, fitted to recorded calls of an H200."""

from __future__ import annotations

import torch

from qgate.arithmetics.attention import BackwardRounding, KnownAttention
from qgate.arithmetics.hopper_16bit import CORE

_DTYPES = (torch.bfloat16, torch.float16)
# Dimension 64 takes 128 keys at once, larger ones fewer. The last tile comes first.
_TILES = (128, 64, 96, 32, 16, 0)

KNOWN = (
    KnownAttention("hopper-flash", "FlashAttention on Hopper", _DTYPES, _TILES, CORE),
    KnownAttention(
        "hopper-cudnn", "cuDNN's attention on Hopper", _DTYPES, _TILES, CORE,
        backward=BackwardRounding(after_scale=True, base_e=True),
    ),
)  # fmt: skip
