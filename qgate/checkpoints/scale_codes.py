"""Count what is stored for scales: subnormal codes of E4M3, and zero points that are no codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.ideal import element_range


@dataclass
class ScaleCodeSums:
    """Counts over the chunks of one weight."""

    subnormal: int = 0
    _outside: int = 0
    _has_fractions: bool = False

    def add(self, weight: QuantizedWeight) -> None:
        """Add the scales and zero points of a chunk."""
        self.subnormal += _count_subnormal(weight.scale_codes)
        zeros = weight.zero_points
        if zeros is None or self._has_fractions:
            return
        # Those with fractions are stored minima.
        self._has_fractions = not bool((zeros == zeros.round()).all())
        low, high = element_range(weight.element)
        self._outside += int(((zeros < low) | (zeros > high)).sum())

    @property
    def outside_zero_points(self) -> int:
        """Return how many whole zero points are no codes of the elements."""
        return 0 if self._has_fractions else self._outside


def _count_subnormal(codes: Tensor | None) -> int:
    """Count E4M3 codes below the smallest normal value, but not zeros."""
    if codes is None or codes.dtype != torch.float8_e4m3fn:
        return 0
    magnitudes = codes.contiguous().view(torch.uint8) & 0x7F
    return int(((magnitudes > 0) & (magnitudes < 8)).sum())
