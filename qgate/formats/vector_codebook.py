"""Vectors of a codebook: GGUF's IQ types, whose codes name four or eight elements at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from qgate.formats._block import block_amax_bits, non_finite, poisoned
from qgate.formats._vectors import HALF, VectorRows, define_tile
from qgate.formats._work import CastContext, ScaledChunk, widen
from qgate.formats.definition import round_by_list
from qgate.formats.options import CastOptions, Floats
from qgate.loading import LateModule

if TYPE_CHECKING:
    from torch import Tensor

    from qgate.formats import vector_books as vector_books
    from qgate.formats.engine import vector_search as vector_search
else:
    vector_books = LateModule("qgate.formats.vector_books")
    vector_search = LateModule("qgate.formats.engine.vector_search")


@dataclass(frozen=True)
class VectorFormat(VectorRows):
    """Rows of a book times a scale for each tile of a block of `size` elements.

    d  FP16(m / (reach * largest factor)), m the block's largest magnitude; in books of single
       levels the first element of that magnitude, with its sign; both times `share`
    s  d * factor of a tile; where the block is one tile, FP16(m / reach * factor)
    r  x / s, at most twice the reach, as a multiple of 2^-8. With signs "even", of eight elements
       an even number is negative: else the one nearest to 0 counts as of the other sign
    e  the row nearest to r, of equals the first; where elements are `shifted`, so many at a time
       are 1 above a row, or 1 below it if that is nearer
    x ~ e * s, which float32 has exactly. A tile takes the factor with the least sum of squares of
    r - e times s^2, of equals the largest, and none at which r ends where another has no such r.
    """

    def with_share(self, share: float) -> VectorFormat:
        return replace(self, share=share)

    def split(self, x: Tensor, context: CastContext) -> ScaledChunk:
        length, bits = x.shape[2], block_amax_bits(x, context.work)
        bad = non_finite(bits, context)
        clean = x.masked_fill(bad, 0.0).movedim(2, -1)
        blocks = clean.new_zeros(*clean.shape[:-1], self.size)
        blocks[..., :length] = clean
        searched = vector_search.search(self, blocks.reshape(-1, self.size))
        elements, ratios, first, codes = (
            part.reshape(*clean.shape[:-1], -1).movedim(-1, 2) for part in searched
        )
        stored = {"scales": first.masked_fill(bad, float("nan")), "micro": codes}
        scale = self.unscale(stored, context)
        elements, scale, ratios = (part[:, :, :length] for part in (elements, scale, ratios))
        return ScaledChunk(elements, scale, ratios, {name: stored[name] for name in self.stored})

    def unscale(self, stored: dict[str, Tensor], context: CastContext) -> Tensor:
        del context
        first = widen(stored["scales"])
        if "micro" not in self.stored:
            return first.expand(-1, -1, self.size, -1)
        factors = first.new_tensor(self.factors)[stored["micro"].int()]
        return (first * factors).repeat_interleave(self.tile, 2)

    def define(self, x: Floats, q: CastOptions, state: float | None, double: bool) -> Floats:
        del state, double
        bad = poisoned(x, q)[:, None]
        blocks = np.zeros((len(x), self.size))
        blocks[:, : x.shape[1]] = np.where(bad, 0.0, x)
        largest = np.abs(blocks).argmax(axis=1)[:, None]
        m = np.take_along_axis(blocks, largest, axis=1) / self.reach * self.share
        m = np.abs(m) if self.book else m
        factors = [self.factors[code] for code in self.tried()]
        d = round_by_list(m / abs(factors[0]), HALF)
        scales = [round_by_list(m * f, HALF) if self.is_whole else d * f for f in factors]
        tiles = []
        for tile in np.split(blocks, self.size // self.tile, axis=1):
            tried = [define_tile(self, tile, s, d) for s in scales]
            best = np.argmin([cost for _, cost in tried], axis=0)
            tiles.append(np.stack([values for values, _ in tried])[best, np.arange(len(x))])
        y = np.concatenate(tiles, axis=1)[:, : x.shape[1]]
        return np.where(bad, np.nan, y)
