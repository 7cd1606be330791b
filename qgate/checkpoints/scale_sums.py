"""Counts of the scales of one weight, and how they lie beside ideal ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qgate.checkpoints.record import ScaleFigures

OCTAVES = 320
"""Exponents of float32, from below the smallest to above the largest."""


@dataclass
class ScaleSums:
    """Counts of scales, and their ratios to ideal ones where these have been made."""

    every: int = 1
    count: int = 0
    not_finite: int = 0
    zero: int = 0
    negative: int = 0
    smallest: float = math.inf
    largest: float = -math.inf
    first: float | None = None
    all_equal: bool = True
    ratios: list[Tensor] = field(default_factory=list)
    octaves: Tensor = field(default_factory=lambda: torch.zeros(OCTAVES, dtype=torch.long))

    def add(self, scales: Tensor, ideal: Tensor | None) -> None:
        count = scales.numel()
        if not count:
            return
        self.first = float(scales[0, 0]) if self.first is None else self.first
        low, high = float(scales.amin()), float(scales.amax())
        is_plain = low > 0 and math.isfinite(high)
        self._add_octaves(scales if is_plain else scales[(scales > 0) & scales.isfinite()])
        self.count += count
        self.all_equal = self.all_equal and low == high == self.first
        if not (math.isfinite(low) and math.isfinite(high)):
            finite = scales[scales.isfinite()]
            self.not_finite += count - finite.numel()
            low = float(finite.min()) if finite.numel() else math.inf
            high = float(finite.max()) if finite.numel() else -math.inf
        if low <= 0:
            self.zero += int((scales == 0).sum())
            self.negative += int((scales < 0).sum())
        self.smallest, self.largest = min(self.smallest, low), max(self.largest, high)
        if ideal is not None and ideal.shape == scales.shape:
            own, other = (x.reshape(-1)[:: self.every] for x in (scales, ideal))
            self.ratios.append(own / other)

    def figures(self) -> ScaleFigures:
        """Return the figures of all scales."""
        ratios = torch.cat(self.ratios) if self.ratios else torch.empty(0)
        ratios = ratios[(ratios > 0) & ratios.isfinite()]
        has_finite = self.smallest <= self.largest
        return ScaleFigures(
            count=self.count,
            not_finite=self.not_finite,
            zero=self.zero,
            negative=self.negative,
            smallest=self.smallest if has_finite else None,
            largest=self.largest if has_finite else None,
            all_equal=self.count > 1 and self.all_equal,
            log2_ratio=float(ratios.log2().median()) if ratios.numel() else None,
            octaves=self._octaves(),
        )

    def _add_octaves(self, scales: Tensor) -> None:
        """Count positive scales by their exponent."""
        exponents = torch.frexp(scales.float())[1].reshape(-1).long()
        self.octaves += torch.bincount(exponents + OCTAVES // 2, minlength=OCTAVES)

    def _octaves(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the counts from the lowest exponent on, with that exponent."""
        used = self.octaves.nonzero().reshape(-1)
        if not used.numel():
            return None
        low, high = int(used[0]), int(used[-1])
        return low - OCTAVES // 2 - 1, tuple(self.octaves[low : high + 1].tolist())
