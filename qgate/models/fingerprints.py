"""Fingerprints that show if a tensor has changed, without a copy of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
# Half a megabyte in double precision stays in a processor's cache; a device is asked less often.
_PART, _PART_ON_DEVICE = 1 << 16, 1 << 20


def fingerprint(tensor: Tensor) -> tuple[object, ...]:
    """Return shape, dtype and device of a tensor and a weighted sum of its values.

    Versions of tensors do not tell: `p.data.mul_(2)` leaves them, and there are none in inference
    mode. The sum has another weight for every element of a part, and for every part, so that swaps
    are seen too.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    weights = _weights(str(tensor.device))
    total = weights.new_zeros(())
    for number, part in enumerate(flat.split(len(weights))):
        share = 0.5 + number * 0.7548776662466927 % 1
        total += share * torch.dot(part.double(), weights[: len(part)])
    return tuple(tensor.shape), tensor.dtype, tensor.device, float(total)


class WeightCache(Generic[T]):
    """Value made of a weight, kept until the weight changes; with gradients it is made anew."""

    def __init__(self, make: Callable[[Tensor], T]) -> None:
        self._make = make
        self._kept: tuple[object, T] | None = None

    def __call__(self, weight: Tensor) -> T:
        if torch.is_grad_enabled() and weight.requires_grad:
            return self._make(weight)
        state = fingerprint(weight)
        if self._kept is None or self._kept[0] != state:
            self._kept = (state, self._make(weight.detach()))
        return self._kept[1]


@lru_cache(maxsize=8)
def _weights(device: str) -> Tensor:
    with torch.inference_mode(False):
        part = _PART if device == "cpu" else _PART_ON_DEVICE
        ramp = torch.arange(1, part + 1, dtype=torch.float64, device=device)
        return (ramp * 0.6180339887498949).frac() + 0.5
