"""Random numbers of stochastic rounding: each follows from its site, its token and its element.

They are the same in every run, whatever the batch, the chunks and the threads. Rows of a batch
share them.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_BITS = 24
_KEPT = 1 << 20
"""Numbers kept by a site: 4 MB."""


def site_key(site: str, seed: int) -> int:
    """Return the 32 bits that draws of a site begin with."""
    return zlib.crc32(site.encode(), seed)


class Draws:
    """Uniform numbers below 1 for the elements of a site, token by token.

    Those of the first tokens are kept, as every sample and every chunk draws them again.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        self._elements = torch.empty(0, dtype=torch.int64)
        self._kept = torch.empty(0, 0)

    def of_tokens(self, first: int, tokens: int, elements: int, device: torch.device) -> Tensor:
        """Return (tokens, elements) multiples of 2^-24, which float32 holds."""
        if self._elements.numel() != elements or self._elements.device != device:
            numbers = torch.arange(elements, device=device)
            self._elements = _mixed(numbers * 0x9E3779B9 + self._key)
            self._kept = self._drawn(0, _KEPT // max(1, elements))
        if first + tokens <= len(self._kept):
            return self._kept[first : first + tokens]
        return self._drawn(first, tokens)

    def _drawn(self, first: int, tokens: int) -> Tensor:
        numbers = torch.arange(first, first + tokens, device=self._elements.device)
        mixed = _mixed(self._elements ^ _mixed(numbers + 0x85EBCA6B).unsqueeze(1))
        return (mixed >> (32 - _BITS)).float() * 2.0**-_BITS


def _mixed(x: Tensor) -> Tensor:
    """Mix 32 bits so that each depends on all: two products and three shifts."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
