"""Fingerprints that show if a tensor has changed, without a copy of it."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_PART = 1 << 20


def fingerprint(tensor: Tensor) -> tuple[object, ...]:
    """Return the address of a tensor and a weighted sum of its values.

    Versions of tensors do not tell: `p.data.mul_(2)` leaves them, and there are none in inference
    mode. The sum has a different weight for every element of a part, so that swaps are seen too.
    """
    flat = tensor.detach().reshape(-1)
    total = 0.0
    for part in flat.split(_PART):
        total += float((part.double() * _weights(len(part), str(part.device))).sum())
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, total


@lru_cache(maxsize=8)
def _weights(count: int, device: str) -> Tensor:
    with torch.inference_mode(False):
        ramp = torch.arange(1, count + 1, dtype=torch.float64, device=device)
        return (ramp * 0.6180339887498949).frac() + 0.5
