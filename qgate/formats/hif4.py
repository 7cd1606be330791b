"""HiFloat4: 64 elements of four bits share one E6M2 scale and two finer levels of one bit each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from qgate.formats._block import BlockFormat, block_amax_bits, non_finite, poisoned
from qgate.formats._element import ElementFormat
from qgate.formats._work import CastContext, ScaledChunk, any_set
from qgate.formats.definition import round_by_list, round_to_bits
from qgate.formats.floats import FloatFormat
from qgate.formats.options import CastOptions, Floats

if TYPE_CHECKING:
    from torch import Tensor

_BF16 = FloatFormat("bf16", 8, 7, "ieee", bias=127)
_SEVENTH = 0.142578125  # 1/7 as a bf16 number
_SMALLEST, _LARGEST = 2.0**-48, 1.5 * 2.0**15


@dataclass(frozen=True)
class Hif4Format(BlockFormat):
    """The conversion of arXiv 2602.11287 as its authors' code does it.

    SF   = amax(64) * 1/7, both the constant and the product in bf16, within [2**-48, 1.5 * 2**15]
    s    = E6M2(SF);  r = 1/s in bf16
    E8   = 1 for each group of 8 whose amax * r >= 4, else 0
    E16  = 1 for each group of 4 whose amax * r * 2**-E8 >= 2, else 0
    e    = S1P2(x * r * 2**-(E8 + E16)), ties away from zero, at most 1.75
    x    ~ e * 2**(E8 + E16) * s
    """

    scale_element: ElementFormat

    options: ClassVar[frozenset[str]] = frozenset({"axis", "rounding", "generator", "inf"})
    scale: ClassVar[str] = "E6M2, 24 E1"
    default_block: ClassVar[int] = 64
    notes = "ties away"
    rounding = "away"

    @property
    def stored(self) -> dict[str, int]:
        return {"scales": 1, "micro": 3}

    @property
    def max(self) -> float:
        return self.element.max * 4

    def values(self) -> Floats:
        """Return all values of an element with its one-bit exponents, in units of the scale."""
        element = self.element.values()
        return np.unique(np.concatenate([element, 2 * element, 4 * element]))

    def split(self, x: Tensor, context: CastContext) -> ScaledChunk:
        q, work = context.q, context.work
        size = x.shape[2]
        if size < 64:
            padded = x.new_zeros(x.shape[0], x.shape[1], 64, x.shape[3])
            padded[:, :, :size] = x
            x = padded
        bits = block_amax_bits(x, work)
        bad = non_finite(bits, context)
        is_bad = any_set(bad)
        x = x.masked_fill(bad, 0.0) if is_bad else x
        magnitude = x.abs()
        quads = magnitude.unflatten(2, (16, 4)).amax(3)
        octets = quads.unflatten(2, (8, 2)).amax(3)
        unrounded = context.multiply(octets.amax(2, keepdim=True), x.new_tensor(_SEVENTH))
        unrounded = _BF16.cast(unrounded, work, rounding="even", saturate=False)
        scale = self.scale_element.cast(
            unrounded.clamp_(_SMALLEST, _LARGEST), work, rounding="even"
        )
        inverse = _BF16.cast(1.0 / scale, work, rounding="even")
        e8 = context.multiply(octets, inverse) >= 4
        fine = context.multiply(quads, inverse)
        e16 = fine >= 2.0 * (1.0 + e8.repeat_interleave(2, 2))
        shift = (1.0 + e8.repeat_interleave(2, 2)) * (1.0 + e16)
        # A power of two changes no digit: each quad has one factor.
        of_quads = context.multiply(x.unflatten(2, (16, 4)), (inverse / shift).unsqueeze(3))
        ratios = of_quads.flatten(2, 3)
        elements = self.element.cast(ratios, work, rounding=q.rounding, generator=q.generator)
        scale = scale.masked_fill(bad, float("nan")) if is_bad else scale
        codes, micro = self.scale_element.to_codes(scale, work), _pack(e8, e16)
        full = (scale * shift).unsqueeze(3).expand_as(of_quads).flatten(2, 3)
        stored = {"scales": codes, "micro": micro}
        elements, full, ratios = (part[:, :, :size] for part in (elements, full, ratios))
        return ScaledChunk(elements, full, ratios, stored)

    def unscale(self, stored: dict[str, Tensor], context: CastContext) -> Tensor:
        scale = self.scale_element.from_codes(stored["scales"], context.work)
        e8, e16 = _unpack(stored["micro"])
        return scale * (1.0 + e8.repeat_interleave(8, 2)) * (1.0 + e16.repeat_interleave(4, 2))

    def define(self, x: Floats, q: CastOptions, state: float | None, double: bool) -> Floats:
        del state, double
        bad = poisoned(x, q)[:, None]
        block = np.zeros((len(x), 64))
        block[:, : x.shape[1]] = np.where(bad, 0.0, x)
        size = np.abs(block)
        octets, quads = (size.reshape(len(x), -1, count).max(axis=2) for count in (8, 4))
        unrounded = round_to_bits(size.max(axis=1, keepdims=True) * _SEVENTH, 8)
        scale = round_by_list(np.clip(unrounded, _SMALLEST, _LARGEST), self.scale_element)
        inverse = round_to_bits(1 / scale, 8)
        e8 = np.repeat(octets * inverse >= 4, 2, axis=1)
        e16 = quads * inverse / (1 + e8) >= 2
        shift = np.repeat((1.0 + e8) * (1.0 + e16), 4, axis=1)
        codes = round_by_list(block * inverse / shift, self.element, rounding=q.rounding)
        return np.where(bad, np.nan, (codes * shift * scale)[:, : x.shape[1]])


def _pack(e8: Tensor, e16: Tensor) -> Tensor:
    """Pack the levels: bit j of the first byte is that of octet j, of the others of quad j."""
    levels = e8.new_zeros(e8.shape[0], e8.shape[1], 3, 8, e8.shape[3])
    levels[:, :, 0] = e8
    levels[:, :, 1:] = e16.unflatten(2, (2, 8))
    weights = (2 ** np.arange(8)).tolist()
    return (levels.byte() * levels.byte().new_tensor(weights)[:, None]).sum(3).byte()


def _unpack(micro: Tensor) -> tuple[Tensor, Tensor]:
    positions = micro.new_tensor(list(range(8)))[:, None]
    bits = (micro.unsqueeze(3) >> positions) & 1
    return bits[:, :, 0], bits[:, :, 1:].flatten(2, 3)
