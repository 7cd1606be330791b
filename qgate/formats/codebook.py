"""Codebooks: elements are levels of a list; a block of them has a float32 scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from qgate.arithmetic import divided
from qgate.formats._block import BlockFormat, block_amax_bits, non_finite, poisoned
from qgate.formats._codebook import BNB_FP4, IQ2, IQ3, IQ3_ODD, IQ4, NF4, TERNARY, Codebook
from qgate.formats._work import DOUBLE, CastContext, ScaledChunk, widen
from qgate.formats.definition import round_by_list
from qgate.formats.floats import to_single_grid
from qgate.formats.options import CastOptions, Floats

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BNB_FP4", "IQ2", "IQ3", "IQ3_ODD", "IQ4", "NF4", "TERNARY", "Codebook", "CodebookFormat",
]  # fmt: skip

_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), 2.0**-149


@dataclass(frozen=True)
class CodebookFormat(BlockFormat):
    """Levels of a codebook times a float32 scale for each block.

    s  the largest magnitude of the block over that of the levels ("amax"), or the root of the mean
       of the squares ("rms"), times `share`; 0 in a block of zeros, else at least the smallest
       float32 number
    e  the level nearest to x / s, a float64 number;  x ~ e * s

    Squares, in units of a power of two near the largest, are summed in halves: the first half is
    added to the second, and an odd last one goes along.
    """

    element: Codebook
    size: int = 64
    scaled_by: Literal["amax", "rms"] = "amax"
    share: float = 1.0

    options: ClassVar[frozenset[str]] = frozenset({"axis", "block", "rounding", "generator", "inf"})
    scale: ClassVar[str] = "FP32"
    stored_dtype: ClassVar[str] = "float32"

    @property
    def block(self) -> int:
        return self.size

    @property
    def takes_tiles(self) -> bool:
        return self.scaled_by == "amax"

    @property
    def notes(self) -> str:
        return "scaled by the largest" if self.scaled_by == "amax" else "scaled by the RMS"

    @property
    def reach(self) -> float:
        """The largest magnitude among the levels."""
        return float(np.abs(self.element.levels).max())

    def with_share(self, share: float) -> CodebookFormat:
        return replace(self, share=share)

    def split(self, x: Tensor, context: CastContext) -> ScaledChunk:
        q = context.q
        bits = block_amax_bits(x, context.work)
        bad = non_finite(bits, context)
        clean = x.masked_fill(bad, 0.0)
        scale = self.scales(clean, bits.view(context.work.dtype).masked_fill(bad, 0.0))
        ratios = clean / scale.where(scale > 0, 1.0)
        elements = self.element.cast(
            ratios, context.work, rounding=q.rounding, generator=q.generator
        )
        scale = scale.masked_fill_(bad, float("nan"))
        return ScaledChunk(elements, scale, ratios, {"scales": scale})

    def scales(self, x: Tensor, amax: Tensor) -> Tensor:
        """Return the scales of float64 blocks without NaN as float64."""
        if self.scaled_by == "amax":
            scale = amax / amax.new_tensor(self.reach) * self.share
        else:
            unit = DOUBLE.power(amax.clamp(max=_LARGEST).frexp()[1].clamp_(min=-1000))
            squares = (x / unit).square_()
            scale = divided(_sum_in_halves(squares), x.shape[2]).sqrt_() * unit * self.share
        return to_single_grid(scale.clamp_(_SMALLEST, _LARGEST)).masked_fill_(amax == 0, 0.0)

    def unscale(self, stored: dict[str, Tensor], context: CastContext) -> Tensor:
        del context
        return widen(stored["scales"])

    def define(self, x: Floats, q: CastOptions, state: float | None, double: bool) -> Floats:
        del state, double
        bad = poisoned(x, q)[:, None]
        elements, scale, _ = self.define_parts(np.where(bad, 0.0, x), q)
        return np.where(bad, np.nan, elements * scale)

    def define_parts(self, x: Floats, q: CastOptions) -> tuple[Floats, Floats, Floats]:
        """Return elements, scales and ratios of rows without NaN, by the readable definition."""
        scale = self.define_scales(x)
        ratios = x / np.where(scale > 0, scale, 1.0)
        return round_by_list(ratios, self.element, rounding=q.rounding), scale, ratios

    def define_scales(self, x: Floats) -> Floats:
        """Return the scale of each row, by the readable definition."""
        amax = np.abs(x).max(axis=1, keepdims=True)
        scale = amax / self.reach if self.scaled_by == "amax" else _defined_rms(x, amax)
        scale = (
            np.clip(scale * self.share, _SMALLEST, _LARGEST).astype(np.float32).astype(np.float64)
        )
        return np.where(amax == 0, 0.0, scale)


def _sum_in_halves(squares: Tensor) -> Tensor:
    """Add float64 numbers along the third axis in an order that is the same everywhere."""
    import torch

    while (count := squares.shape[2]) > 1:
        half, end = count // 2, count // 2 * 2
        pairs = squares[:, :, :half] + squares[:, :, half:end]
        squares = torch.cat([pairs, squares[:, :, end:]], 2) if end < count else pairs
    return squares


def _defined_rms(x: Floats, amax: Floats) -> Floats:
    """Return the root of the mean square of each row, by the readable definition."""
    unit = np.exp2(np.maximum(np.frexp(np.minimum(amax, _LARGEST))[1], -1000))
    with np.errstate(over="ignore"):
        terms = list(((x / unit) ** 2).T)
    while len(terms) > 1:
        half = len(terms) // 2
        pairs = [a + b for a, b in zip(terms[:half], terms[half:], strict=False)]
        terms = pairs + terms[2 * half :]
    return np.asarray(np.sqrt(terms[0] / x.shape[1])[:, None] * unit)
