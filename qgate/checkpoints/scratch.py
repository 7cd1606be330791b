"""Memory for chunks that is used again: fresh memory costs more than the work on it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Scratch:
    """Tensors by name, each valid until its name is asked for again."""

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor with anything in it."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            flat = self._flat[name] = torch.empty(size, dtype=dtype)
        return flat[:size].view(shape)

    def padded(self, name: str, x: Tensor, shape: tuple[int, int]) -> Tensor:
        """Copy a matrix to float32, with zeros below it and to its right."""
        wide = self.get(name, shape)
        if wide.shape == x.shape:
            return wide.copy_(x)
        wide.zero_()[: x.shape[0], : x.shape[1]].copy_(x)
        return wide
