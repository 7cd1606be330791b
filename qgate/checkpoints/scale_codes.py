"""Count what is stored for scales: subnormal codes of E4M3, and zero points that are no codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.checkpoints.grids import FP4_UNIT, QuantizedWeight
from qgate.checkpoints.ideal import element_range

ENOUGH = 1 << 12
"""Blocks of NVFP4 that tell how their largest elements were chosen."""


@dataclass
class ScaleCodeSums:
    """Counts over the chunks of one weight."""

    subnormal: int = 0
    fours: int = 0
    sixes: int = 0
    _outside: int = 0
    _has_fractions: bool = False

    def add(self, weight: QuantizedWeight) -> None:
        """Add the scales and zero points of a chunk."""
        self.subnormal += _count_subnormal(weight.scale_codes)
        self._see_maxima(weight)
        zeros = weight.zero_points
        if zeros is None or self._has_fractions:
            return
        # Those with fractions are stored minima.
        self._has_fractions = not bool((zeros == zeros.round()).all())
        low, high = element_range(weight.element)
        self._outside += int(((zeros < low) | (zeros > high)).sum())

    def _see_maxima(self, weight: QuantizedWeight) -> None:
        """Count blocks of NVFP4 by their largest element, in leading rows."""
        codes, enough = weight.scale_codes, self.fours + self.sixes >= ENOUGH
        is_nvfp4 = weight.element == "fp4_e2m1" and weight.tile == (1, 16)
        if enough or codes is None or codes.dtype != torch.float8_e4m3fn or not is_nvfp4:
            return
        some = weight.rows(0, min(len(weight.elements), -(-16 * ENOUGH // weight.shape[1])))
        largest = some.in_tiles(some.elements).abs().amax((1, 3))
        self.fours += int((largest == 4 / FP4_UNIT).sum())
        self.sixes += int((largest == 6 / FP4_UNIT).sum())

    @property
    def fours_share(self) -> float | None:
        """Return the share of blocks whose largest element is 4, of those with 4 or 6."""
        count = self.fours + self.sixes
        return self.fours / count if count else None

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
