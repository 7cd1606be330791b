"""Figures of blocks: elements along the last dimension that would share a scale.

The blocks are those of the sample, whole and aligned, 32 elements each and fewer at the end of a
row. A block with a value that is not finite has no scale and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from qgate.collecting.values import BLOCK, Array, ValueReading, value_table
from qgate.formats.losses import Losses
from qgate.formats.mx import MxFormat
from qgate.stats.bits import COUNTABLE

_LARGEST_SCALE = 127


@dataclass(frozen=True)
class Blocks:
    """Magnitudes of the sampled elements, the length of each block, and its largest magnitude.

    `without_scale` counts the finite elements of blocks that are left out.
    """

    sizes: Array
    lengths: Array
    largest: Array
    without_scale: int = 0

    @property
    def stats(self) -> dict[str, float]:
        """How many powers of two the largest values of blocks lie apart, and the share of blocks
        that are zero."""
        if not self.lengths.size:
            return {}
        there = self.largest[self.largest > 0]
        spread = np.ptp(np.frexp(there)[1]) if there.size else 0
        return {
            f"block{BLOCK}.spread_binades": float(spread),
            f"block{BLOCK}.zero_share": (self.largest.size - there.size) / self.largest.size,
        }

    def losses(self, fmt: MxFormat) -> Losses:
        """Count what saturates and what becomes zero, with the scales of the floor rule."""
        if not self.lengths.size:
            return Losses(nonzero=self.without_scale, poisoned=self.without_scale)
        wanted = fmt.define_exponents(self.largest.astype(np.float64), "floor", _LARGEST_SCALE)
        scales = np.ldexp(1.0, np.clip(wanted, -_LARGEST_SCALE, _LARGEST_SCALE).astype(int))
        element = fmt.element
        saturated = int((self.sizes >= self._each_from(element.saturates_from() * scales)).sum())
        zeros = int((self.sizes == 0).sum())
        small = int((self.sizes < self._each_from(element.survives_from() * scales)).sum())
        return Losses(
            zeros=zeros,
            nonzero=self.sizes.size - zeros + self.without_scale,
            upper=saturated,
            flushed=small - zeros,
            poisoned=self.without_scale,
            beyond_range=None,
        )

    def _each_from(self, of_block: Array) -> Array:
        """Repeat the first magnitude of a range, per block, for the block's elements.

        Rounded up to the dtype of the magnitudes, of which the same are in the range.
        """
        with np.errstate(over="ignore"):
            first = of_block.astype(self.sizes.dtype)
        above = np.nextafter(first, np.array(np.inf, first.dtype))
        return self._for_each(np.where(first < of_block, above, first))

    def _for_each(self, of_block: Array) -> Array:
        """One number per block, as it meets the block's elements."""
        return np.repeat(of_block, self.lengths)


def blocks_of(reading: ValueReading) -> Blocks | None:
    """The blocks of what was sampled; None where no values were."""
    if reading.sample is None or reading.lengths is None or reading.counted_as is None:
        return None
    sizes = _magnitudes(reading)
    lengths = reading.lengths
    if not lengths.size:
        return Blocks(sizes, lengths, sizes)
    if (lengths == BLOCK).all():
        largest = sizes.reshape(-1, BLOCK).max(1)
    else:
        starts = np.cumsum(lengths, dtype=np.intp) - lengths
        largest = np.maximum.reduceat(sizes, starts)
    if any(reading.nonfinite.values()):
        whole = np.isfinite(largest)
        finite = int(np.isfinite(sizes).sum())
        sizes = sizes[np.repeat(whole, lengths)]
        lengths, largest = lengths[whole], largest[whole]
        return Blocks(sizes, lengths, largest, finite - sizes.size)
    return Blocks(sizes, lengths, largest)


def _magnitudes(reading: ValueReading) -> Array:
    sample = reading.sample
    assert sample is not None
    return _table(reading.dtype)[sample] if reading.dtype in COUNTABLE else np.abs(sample)


@lru_cache(maxsize=8)
def _table(dtype: torch.dtype) -> Array:
    with np.errstate(invalid="ignore"):
        return np.abs(value_table(dtype)).astype(np.float32)
