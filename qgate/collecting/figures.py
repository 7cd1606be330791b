"""Figures of a record, computed from a reading while the model runs on.

Plain numpy without `dot` and `@`, whose BLAS threads would take the processors of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from qgate.collecting.values import BLOCK, Array, ValueReading
from qgate.errors import QgateError
from qgate.formats import FORMATS, ElementFormat
from qgate.formats.losses import Losses, losses_of_values
from qgate.formats.mx import MxFormat, mx_format
from qgate.stats import Counts
from qgate.stats.bits import COUNTABLE, decoded, short_name
from qgate.stats.moments import PowerPass

_LARGEST_SCALE = 127
_LABELS = {"hifp8": "hif8", "hif8": "hif8", "fp8": "fp8_e4m3", "mxfp6": "mxfp6_e3m2"}


@dataclass(frozen=True)
class Figures:
    """Figures of a tensor's values, as a record has them."""

    stats: dict[str, float]
    nonfinite: dict[str, int]
    sampled: float
    counted: Counts | None

    @property
    def counts(self) -> dict[str, Array] | None:
        """Patterns that occur with their counts, as a dump stores them."""
        if self.counted is None:
            return None
        patterns, counts = self.counted.occurring
        narrow = np.uint32 if not len(counts) or counts.max() < 2**32 else np.uint64
        return {"patterns": patterns, "counts": counts.astype(narrow)}

    @property
    def counted_as(self) -> str:
        return "" if self.counted is None else self.counted.dtype


def figures_of(reading: ValueReading) -> Figures:
    """Compute the figures of a reading; the model does not wait for them."""
    stats: dict[str, float] = {}
    finite = reading.elements - sum(reading.nonfinite.values())
    counted = _counted(reading)
    if finite:
        amax = max(abs(reading.low), abs(reading.high))
        moments = _moments(reading, counted, finite)
        stats = {"min": reading.low, "max": reading.high, **moments, "amax": amax}
    stats["elements"] = finite
    return Figures(
        {name: value for name, value in stats.items() if math.isfinite(value)},
        reading.nonfinite,
        reading.counted / reading.elements if reading.elements else 1.0,
        counted,
    )


def _counted(reading: ValueReading) -> Counts | None:
    dtype, counts, sample = reading.counted_as, reading.counts, reading.sample
    if dtype is None or (counts is None and sample is None):
        return None
    if counts is None and sample is not None:
        bits = sample
        if reading.dtype not in COUNTABLE:
            bits = _rounded_to_bf16(bits, any_nan=reading.nonfinite["nan"] > 0)
        counts = np.bincount(bits, minlength=256**dtype.itemsize)
    return Counts(short_name(dtype), counts)


def _rounded_to_bf16(x: Array, *, any_nan: bool) -> Array:
    """Return bit patterns, rounded to nearest, ties to even; NaN stays NaN."""
    with np.errstate(over="ignore"):
        bits = x.astype(np.float32, copy=False).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    if any_nan:
        rounded[np.isnan(x)] = 0x7FC0
    return rounded.astype(np.uint16)


def _moments(reading: ValueReading, counted: Counts | None, finite: int) -> dict[str, float]:
    """Return mean and standard deviation, as a population, of the finite values counted."""
    if reading.dtype in COUNTABLE:
        figures = counted.moments.figures() if counted is not None else {}
    elif reading.sums is not None:
        mean = reading.sums[0] / finite
        std = math.sqrt(max(reading.sums[1] / finite - mean * mean, 0.0))
        return {"mean": mean, "std": std}
    elif reading.sample is not None:
        values = reading.sample.astype(np.float64)
        if any(reading.nonfinite.values()):
            values = values[np.isfinite(values)]
        powers = PowerPass(max(abs(reading.low), abs(reading.high)), order=2)
        powers.take(torch.from_numpy(values))
        figures = powers.moments().figures()
    else:
        figures = {}
    return {name: figures[name] for name in ("mean", "std") if name in figures}


# Blocks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """Magnitudes of the sampled elements, the length of each block, and its largest magnitude.

    Blocks are elements along the last dimension that would share a scale: those of the sample,
    whole and aligned, 32 elements each and fewer at the end of a row. `without_scale` counts the
    finite elements of blocks with a value that is not finite, which are left out.
    """

    sizes: Array
    lengths: Array
    largest: Array
    without_scale: int = 0

    @property
    def stats(self) -> dict[str, float]:
        """Spread of the largest values of blocks in powers of two, and the share of zero blocks."""
        if not self.lengths.size:
            return {}
        nonzero = self.largest[self.largest > 0]
        spread = np.ptp(np.frexp(nonzero)[1]) if nonzero.size else 0
        return {
            f"block{BLOCK}.spread_binades": float(spread),
            f"block{BLOCK}.zero_share": (self.largest.size - nonzero.size) / self.largest.size,
        }

    def losses(self, fmt: MxFormat) -> Losses:
        """Count saturated and flushed values, with scales of the floor rule."""
        if not self.lengths.size:
            return Losses(nonzero=self.without_scale, poisoned=self.without_scale)
        exponents = fmt.define_exponents(self.largest.astype(np.float64), "floor", _LARGEST_SCALE)
        scales = np.ldexp(1.0, np.clip(exponents, -_LARGEST_SCALE, _LARGEST_SCALE).astype(int))
        element = fmt.element
        saturated = int(
            (self.sizes >= self._first_magnitudes(element.saturates_from() * scales)).sum()
        )
        zeros = int((self.sizes == 0).sum())
        small = int((self.sizes < self._first_magnitudes(element.survives_from() * scales)).sum())
        return Losses(
            zeros=zeros,
            nonzero=self.sizes.size - zeros + self.without_scale,
            upper=saturated,
            flushed=small - zeros,
            poisoned=self.without_scale,
            beyond_range=None,
        )

    def _first_magnitudes(self, of_block: Array) -> Array:
        """Repeat the first magnitude of a range, per block, for the block's elements.

        It is rounded up to the dtype of the magnitudes, so that the same ones are in the range.
        """
        with np.errstate(over="ignore"):
            first = of_block.astype(self.sizes.dtype)
        above = np.nextafter(first, np.array(np.inf, first.dtype))
        return np.repeat(np.where(first < of_block, above, first), self.lengths)


def blocks_of(reading: ValueReading) -> Blocks | None:
    """Return the blocks of a sample; None without a sample."""
    if reading.sample is None or reading.lengths is None or reading.counted_as is None:
        return None
    counted = reading.dtype in COUNTABLE
    sizes = _magnitudes(reading.dtype)[reading.sample] if counted else np.abs(reading.sample)
    lengths = reading.lengths
    if not lengths.size:
        return Blocks(sizes, lengths, sizes)
    if (lengths == BLOCK).all():
        largest = sizes.reshape(-1, BLOCK).max(1)
    else:
        starts = np.cumsum(lengths, dtype=np.intp) - lengths
        largest = np.maximum.reduceat(sizes, starts)
    if not any(reading.nonfinite.values()):
        return Blocks(sizes, lengths, largest)
    whole = np.isfinite(largest)
    finite = int(np.isfinite(sizes).sum())
    sizes = sizes[np.repeat(whole, lengths)]
    return Blocks(sizes, lengths[whole], largest[whole], finite - sizes.size)


@lru_cache(maxsize=8)
def _magnitudes(dtype: torch.dtype) -> Array:
    with np.errstate(invalid="ignore"):
        return np.abs(decoded(dtype)).astype(np.float32)


# Losses of a format ----------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _format(label: str) -> ElementFormat | MxFormat | None:
    """Return the format that a label names, if the label determines its scales.

    An element format has no scales, an MX format one per block. Other formats scale a whole tensor
    or channel in ways that a label does not determine.
    """
    try:
        fmt = FORMATS.get(_LABELS.get(label.lower(), label.lower()))
    except QgateError:
        return None
    if fmt.kind == "block":
        mx = mx_format(fmt)
        return mx if mx is not None and (mx.block, mx.default_rule) == (BLOCK, "floor") else None
    return None if fmt.always_scaled else fmt


def shares_of(label: str, figures: Figures, blocks: Blocks | None) -> dict[str, float]:
    """Return the shares of finite values that the format saturates and flushes."""
    fmt = _format(label) if label else None
    losses = None
    if fmt is None:
        return {}
    if fmt.kind == "block":
        losses = None if blocks is None else blocks.losses(fmt)
    elif figures.counted is not None:
        rounded = losses_of_values(fmt, figures.counted.values, figures.counted.occurring[1])
        nonfinite = figures.nonfinite
        losses = rounded.before_rounding(nonfinite["posinf"], nonfinite["neginf"])
    if losses is None or not losses.finite:
        return {}
    return {
        f"{fmt.name}.saturated_share": losses.saturated_share,
        f"{fmt.name}.flushed_share": losses.flushed_share,
    }
