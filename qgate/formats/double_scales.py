"""Double quantization of bitsandbytes: scales of blocks in 8 bits, as QLoRA stores NF4."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from qgate.formats._block import poisoned
from qgate.formats._work import DOUBLE, CastContext, ScaledChunk, widen
from qgate.formats.codebook import CodebookFormat
from qgate.formats.floats import to_single_grid
from qgate.formats.options import CastOptions, Floats

if TYPE_CHECKING:
    from torch import Tensor

_GROUP = 256
"""Scales that share a scale of their own."""


@functools.cache
def dynamic_levels() -> tuple[float, ...]:
    """Return the 256 levels of the dynamic type of bitsandbytes (arXiv 1511.04561), ascending.

    Each decade from 10^-7 to 1 has twice as many as the one below, between equal steps of it.
    """
    start, levels = float(np.float32(0.1)), [0.0, 1.0]
    for power in range(7):
        count = 2**power
        step = float((np.float32(1) - np.float32(0.1)) / np.float32(count))
        places = np.arange(count + 1)
        # As torch.linspace: from both ends, each product and sum rounded once.
        bounds = np.where(places < (count + 1) // 2, start + step * places, 1 - step * places[::-1])
        pairs = bounds.astype(np.float32)
        means = np.float32(10.0 ** (power - 6)) * ((pairs[:-1] + pairs[1:]) / np.float32(2))
        levels += [*means.tolist(), *(-means).tolist()]
    return tuple(sorted(levels))


@dataclass(frozen=True)
class DoubleScales:
    """Scales in 8 bits: codes of `dynamic_levels`, a float32 number for each 256, and an offset."""

    codes: Tensor
    largest: Tensor
    offset: float

    @classmethod
    def of(cls, scales: Tensor) -> DoubleScales:
        """Quantize float32 scales in their order: less their mean, over the largest of 256."""
        import torch

        flat = scales.reshape(-1).double()
        offset = float(np.float32(math.fsum(flat.tolist()) / max(flat.numel(), 1)))
        missing = -flat.numel() % _GROUP
        groups = to_single_grid(torch.nn.functional.pad(flat - offset, (0, missing)))
        groups = groups.view(-1, _GROUP)
        largest = groups.abs().amax(1, keepdim=True)
        inverse = to_single_grid(1.0 / largest.where(largest > 0, 1.0))
        levels = np.array(dynamic_levels(), dtype=np.float32)
        middles = ((levels[1:] + levels[:-1]) / np.float32(2)).astype(np.float64)
        edges = DOUBLE.table("dynamic middles", middles.tolist, flat.device)
        codes = torch.bucketize(to_single_grid(groups * inverse), edges).view(-1)
        return cls(codes[: flat.numel()].view(scales.shape).byte(), largest.float(), offset)

    def decode(self) -> Tensor:
        """Return the scales as float32 numbers."""
        levels = DOUBLE.table("dynamic levels", dynamic_levels, self.codes.device)
        flat = levels[self.codes.int().reshape(-1)]
        sizes = self.largest.double().reshape(-1).repeat_interleave(_GROUP)[: flat.numel()]
        scales = to_single_grid(to_single_grid(flat * sizes) + self.offset)
        return scales.float().view(self.codes.shape)


@dataclass(frozen=True)
class DoubleFormat(CodebookFormat):
    """A codebook whose scales are quantized again, all those of a tensor in their order.

    Elements are those of the codebook; what they are multiplied by is stored in 8 bits:
    d      a scale less their mean, and c the largest magnitude of 256 such numbers
    level  the one of `dynamic_levels` nearest to d * (1 / c), of equals the lower
    s      level * c + mean, each step in float32
    Blocks are along the last axis; the largest finite magnitude of a block counts.
    """

    by_blocks: ClassVar[bool] = True
    needs_amax: ClassVar[bool] = True
    options: ClassVar[frozenset[str]] = frozenset({"block", "rounding", "generator"})
    scale: ClassVar[str] = "8 bits, FP32"
    takes_tiles = False

    def with_share(self, share: float) -> None:  # type: ignore[override]
        """Return None: a sweep of the codebook's own scales says what these lose, too."""
        del share

    def prepare(self, amax: Tensor) -> Tensor:
        """Return the scales that are stored, from the largest magnitude of each block."""
        exact = self.scales(widen(amax), widen(amax))
        return DoubleScales.of(exact.float()).decode().double()

    def split(self, x: Tensor, context: CastContext) -> ScaledChunk:
        parts, stored = super().split(x, context), context.state
        assert stored is not None
        scale = stored.masked_fill(parts.scale.isnan(), float("nan"))
        return ScaledChunk(parts.elements, scale, parts.ratios, {"scales": scale})

    def define(self, x: Floats, q: CastOptions, state: float | None, double: bool) -> Floats:
        del double
        assert state is not None
        bad = poisoned(x, q)[:, None]
        elements, _, _ = self.define_parts(np.where(bad, 0.0, x), q)
        return np.where(bad, np.nan, elements * state)

    def define_stored(self, amax: Floats) -> Floats:
        """Return the scales that are stored for blocks in their order, by the definition."""
        levels = np.array(dynamic_levels(), dtype=np.float32)
        middles = (levels[1:] + levels[:-1]) / np.float32(2)
        exact = self.define_scales(amax.reshape(-1, 1)).ravel()
        offset = np.float32(math.fsum(exact.tolist()) / max(len(exact), 1))
        stored = np.empty(len(exact), dtype=np.float32)
        for start in range(0, len(exact), _GROUP):
            part = slice(start, start + _GROUP)
            d = exact[part].astype(np.float32) - offset
            c = np.abs(d).max()
            ratios = d * (np.float32(1) / (c if c > 0 else np.float32(1)))
            stored[part] = levels[middles.searchsorted(ratios)] * c + offset
        return stored.astype(np.float64).reshape(amax.shape)
