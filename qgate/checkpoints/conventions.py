"""Conventions of right exporters for blocks whose scales or elements follow their own rules.

A convention quantizes tiles x elements of a parent, as near as a few operations come to what the
format's reference does. What ggml's quantizers search for longer, with and without weights of
importance, was less than 0.8 dB from it for weights of several distributions; `excess_db` is the
middle of what was measured. Where a code book holds few combinations of levels, the error of the
nearest levels is stretched to that of the book, which a sample tells.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qgate.checkpoints.gguf.codebook_errors import SAMPLE, book_error
from qgate.formats.codebook import BNB_FP4, IQ2, IQ3, IQ3_ODD, IQ4, NF4, TERNARY
from qgate.formats.vector_books import DELTA, CodeBook

Quantized = tuple[Tensor, Tensor]
NESTED = ("nf4", "bnb_fp4")
"""Elements whose scales may be quantized, too."""
BINS = 1 << 12
"""Bins between the first and the last level."""
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class BlockConvention:
    """A format by its elements, and how right exporters quantize tiles.

    low, high    smallest and largest element
    quantize     from the convention and rows x tiles x elements to values and scales of tiles
    has_signs    scales may be negative
    excess_db    error of references over that of `quantize`
    levels       elements, where they are not all whole numbers from low to high
    book         the combinations of elements that there are, where not all are
    tiles        tiles of a block, which is written at once
    """

    low: float
    high: float
    quantize: Callable[[BlockConvention, Tensor], Quantized]
    has_signs: bool = False
    excess_db: float = 0.0
    levels: tuple[float, ...] = ()
    book: CodeBook | None = None
    tiles: int = 1

    def ideal(self, tiles: Tensor) -> Quantized:
        """Return what references make of tiles, with the error that they have on average."""
        values, scales = self.quantize(self, tiles)
        excess = 10 ** (self.excess_db / 20)
        if self.book is not None:
            rows, ideals = tiles.flatten(0, 1), values.flatten(0, 1)
            sample = torch.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).long()
            nearest = float((ideals[sample] - rows[sample]).square().sum(dtype=torch.float64))
            if nearest > 0:
                excess *= math.sqrt(book_error(self.book, rows[sample]) / nearest)
        return (values if excess == 1 else torch.lerp(tiles, values, excess)), scales


def count_zero_blocks(values: Tensor, ideal: Tensor, size: int) -> int:
    """Count blocks of so many columns that are all zero and are not in the ideal values."""
    if values.shape[1] % size:
        return 0
    blocks = values.reshape(-1, size)
    may_be_zero = (blocks[:, 0] == 0).nonzero()[:, 0]
    is_zero = (blocks[may_be_zero] == 0).all(1)
    return int((ideal.reshape(-1, size)[may_be_zero[is_zero]] != 0).any(1).sum())


def folded(reduce: Callable[[Tensor, Tensor], Tensor], tiles: Tensor) -> Tensor:
    """Reduce the last axis, one half with the other: faster than torch for few elements."""
    while tiles.shape[2] > 1 and tiles.shape[2] % 2 == 0:
        half = tiles.shape[2] // 2
        tiles = reduce(tiles[..., :half], tiles[..., half:])
    while tiles.shape[2] > 1:
        tiles = torch.cat([reduce(tiles[..., :1], tiles[..., 1:2]), tiles[..., 2:]], 2)
    return tiles


def _usable(scales: Tensor) -> Tensor:
    return torch.where(scales.abs() > TINY, scales, 1.0)


def _half(x: Tensor) -> Tensor:
    return x.half().float()


def _signed_largest(tiles: Tensor) -> Tensor:
    """Return the element of largest magnitude of each tile, with its sign."""
    low, high = folded(torch.minimum, tiles), folded(torch.maximum, tiles)
    return torch.where(high >= -low, high, low)


def signed_scale(
    to: BlockConvention, tiles: Tensor, stored: Callable[[Tensor], Tensor] = _half
) -> Quantized:
    """Quantize to low … -low - 1: the largest element of a tile becomes low."""
    exact = _signed_largest(tiles) / to.low
    codes = (tiles / _usable(exact)).round_().clamp_(to.low, -to.low - 1)
    scales = stored(exact)
    return codes.mul_(scales), scales[..., 0]


def largest_scale(to: BlockConvention, tiles: Tensor) -> Quantized:
    """Quantize to low … -low: the largest magnitude of a tile becomes -low."""
    exact = folded(torch.maximum, tiles.abs()) / -to.low
    codes = (tiles / _usable(exact)).round_().clamp_(to.low, -to.low)
    scales = _half(exact)
    return codes.mul_(scales), scales[..., 0]


def least_and_most(to: BlockConvention, tiles: Tensor) -> Quantized:
    """Quantize to 0 … high from the least to the largest element of a tile."""
    least = folded(torch.minimum, tiles)
    exact = (folded(torch.maximum, tiles) - least) / to.high
    codes = ((tiles - least) / _usable(exact)).round_().clamp_(0, to.high)
    scales = _half(exact)
    return codes.mul_(scales).add_(_half(least)), scales[..., 0]


def _stepped(x: Tensor, count: int, low: int, high: int) -> Tensor:
    """Round numbers of tiles to multiples of a float16 number for each block of so many tiles."""
    blocks = x.reshape(len(x), -1, count)
    if low < 0:
        whole = _half(_signed_largest(blocks) / low)
    else:
        whole = _half(folded(torch.maximum, blocks) / high)
    steps = (blocks / _usable(whole)).round_().clamp_(low, high)
    return steps.mul_(whole).reshape(x.shape)


def scales_and_minima(to: BlockConvention, tiles: Tensor, steps: int) -> Quantized:
    """Quantize to 0 … high with minima at most 0; both are steps of a number for each block."""
    least = folded(torch.minimum, tiles).clamp_(max=0)
    scales = (folded(torch.maximum, tiles) - least).clamp_(min=0) / to.high
    # The best scale and minimum for these codes, once.
    codes = ((tiles - least) / _usable(scales)).round_().clamp_(0, to.high)
    size = tiles.shape[2]
    mean_code = folded(torch.add, codes) / size
    mean = folded(torch.add, tiles) / size
    codes -= mean_code
    spread = folded(torch.add, codes.square())
    fitted = folded(torch.add, codes * tiles) / _usable(spread)
    minima = mean - fitted * mean_code
    is_better = (spread > 0) & (fitted > 0) & (minima <= 0)
    scales = torch.where(is_better, fitted, scales)
    least = torch.where(is_better, minima, least)
    scales = _stepped(scales, to.tiles, 0, steps)
    minima = _stepped(-least, to.tiles, 0, steps)
    codes = ((tiles + minima) / _usable(scales)).round_().clamp_(0, to.high)
    return codes.mul_(scales).sub_(minima), scales[..., 0]


def stepped_scales(to: BlockConvention, tiles: Tensor, steps: int) -> Quantized:
    """Quantize to low … high with scales that are steps of a number for each block."""
    scales = _signed_largest(tiles) / to.low
    codes = (tiles / _usable(scales)).round_().clamp_(to.low, to.high)
    energy = folded(torch.add, codes.square())
    fitted = folded(torch.add, codes * tiles) / _usable(energy)
    scales = torch.where(energy > 0, fitted, scales)
    scales = _stepped(scales, to.tiles, -steps, steps - 1)
    codes = (tiles / _usable(scales)).round_().clamp_(to.low, to.high)
    return codes.mul_(scales), scales[..., 0]


def nearest_levels(to: BlockConvention, tiles: Tensor, reach: float, steps: int = 0) -> Quantized:
    """Quantize to the nearest level; the largest magnitude of a tile is `reach` times the scale.

    Levels are those of positive numbers, where all of them are positive; signs are kept.
    """
    scales = folded(torch.maximum, tiles.abs()) / reach
    codes = to_levels(to.levels, tiles / _usable(scales))
    energy = folded(torch.add, codes.square())
    fitted = folded(torch.add, codes * tiles) / _usable(energy)
    scales = torch.where(fitted > 0, fitted, scales)
    if steps:
        scales = _stepped(scales, to.tiles, 0, steps)
    codes = to_levels(to.levels, tiles / _usable(scales))
    return codes * scales, scales[..., 0]


def largest_level(to: BlockConvention, tiles: Tensor) -> Quantized:
    """Quantize to the nearest level, where the largest magnitude of a tile becomes 1."""
    scales = folded(torch.maximum, tiles.abs())
    return to_levels(to.levels, tiles / _usable(scales)).mul_(scales), scales[..., 0]


def to_levels(levels: tuple[float, ...], x: Tensor) -> Tensor:
    """Round to the nearest of ascending levels, to the width of a bin at the middles.

    Where all levels are positive, signs are kept.
    """
    table = _level_table(levels)
    scale = (BINS - 1) / (levels[-1] - levels[0])
    is_mirrored = levels[0] > 0
    places = (x.abs() if is_mirrored else x).sub(levels[0]).mul_(scale).round_()
    # A NaN is in no bin, and int() of one is no index.
    bins = places.nan_to_num_(0).clamp_(0, BINS - 1).int()
    values = table.index_select(0, bins.reshape(-1)).reshape(x.shape)
    return values.copysign_(x) if is_mirrored else values


@functools.cache
def _level_table(levels: tuple[float, ...]) -> Tensor:
    """Return the nearest level of each of many bins: looked up faster than searched."""
    listed = torch.tensor(levels)
    bins = torch.linspace(levels[0], levels[-1], BINS)
    return listed[torch.bucketize(bins, (listed[1:] + listed[:-1]) / 2)]


def mean_magnitude(_: BlockConvention, tiles: Tensor) -> Quantized:
    """Quantize to -1 and 1 times the mean magnitude."""
    scales = _half(tiles.abs().mean(2, keepdim=True))
    return torch.where(tiles >= 0, scales, -scales), scales[..., 0]


def _book(
    name: str, levels: tuple[float, ...], tiles: int, signs: str, excess_db: float
) -> BlockConvention:
    largest = levels[-1] + (0.0 if signs else 1 / DELTA)
    book = CodeBook(name, largest, signs) if signs else CodeBook(name, 1.5, shift=1 / DELTA)
    quantize = partial(nearest_levels, reach=levels[-1] * (1.05 if signs else 1.3), steps=31)
    return BlockConvention(
        -largest, largest, quantize, excess_db=excess_db, levels=levels, book=book, tiles=tiles
    )


CONVENTIONS: Mapping[str, BlockConvention] = {
    "q4_0": BlockConvention(-8, 7, signed_scale, has_signs=True),
    "q4_1": BlockConvention(0, 15, least_and_most),
    "q5_0": BlockConvention(-16, 15, signed_scale, has_signs=True),
    "q5_1": BlockConvention(0, 31, least_and_most),
    "q8_0": BlockConvention(-127, 127, largest_scale),
    "q8_k": BlockConvention(-127, 127, partial(signed_scale, stored=lambda x: x), has_signs=True),
    "q2_k": BlockConvention(0, 3, partial(scales_and_minima, steps=15), excess_db=0.35, tiles=16),
    "q3_k": BlockConvention(-4, 3, partial(stepped_scales, steps=32), has_signs=True, tiles=16),
    "q4_k": BlockConvention(0, 15, partial(scales_and_minima, steps=63), excess_db=-0.3, tiles=8),
    "q5_k": BlockConvention(0, 31, partial(scales_and_minima, steps=63), excess_db=-0.2, tiles=8),
    "q6_k": BlockConvention(
        -32, 31, partial(stepped_scales, steps=128), has_signs=True, excess_db=-0.2, tiles=16
    ),
    "q1_0": BlockConvention(-1, 1, mean_magnitude, levels=(-1.0, 1.0)),
    "q2_0": BlockConvention(-1, 2, largest_scale),
    "tq1_0": BlockConvention(-1, 1, largest_scale),
    "tq2_0": BlockConvention(-1, 1, largest_scale),
    "iq4_nl": BlockConvention(-127, 113, partial(nearest_levels, reach=120), True, -0.65, IQ4),
    "iq4_xs": BlockConvention(
        -127, 113, partial(nearest_levels, reach=120, steps=31), True, -0.65, IQ4, tiles=8
    ),
    "iq3_s": _book("IQ3_S", IQ3_ODD, 8, "free", 0.6),
    "iq3_xxs": _book("IQ3_XXS", IQ3, 8, "even", 0.65),
    "iq2_xxs": _book("IQ2_XXS", IQ2, 8, "even", 0.75),
    "iq2_xs": _book("IQ2_XS", IQ2, 16, "even", 0.85),
    "iq2_s": _book("IQ2_S", IQ2, 16, "free", 0.6),
    "iq1_s": _book("IQ1_S", TERNARY, 8, "", 1.1),
    "iq1_m": _book("IQ1_S", TERNARY, 16, "", 0.95),
    "nf4": BlockConvention(-1, 1, largest_level, levels=NF4),
    "bnb_fp4": BlockConvention(-1, 1, largest_level, levels=tuple(sorted(set(BNB_FP4)))),
}
"""The formats with a convention, by the name of the element."""
