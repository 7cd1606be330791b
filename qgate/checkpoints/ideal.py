"""The ideal quantizer of a weight's format: its scales are made from the parent, tile by tile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from qgate.checkpoints.conventions import CONVENTIONS, to_levels
from qgate.checkpoints.grids import QuantizedWeight, decode_e8m0, widen
from qgate.formats import get
from qgate.formats.floats import FloatFormat

FLOAT32_EXPONENT = 0xFF << 23
"""The bits of a float32 number that are its exponent."""


@dataclass(frozen=True)
class Extremes:
    """The smallest and the largest value of each tile; without zero points, magnitudes alone."""

    largest: Tensor
    smallest: Tensor | None = None

    @classmethod
    def of(cls, tiles: Tensor, *, signed: bool, bits: Tensor | None = None) -> Extremes:
        """Find the extremes of tiles [down, height, across, width]; `bits` may be overwritten."""
        if signed:
            return cls(tiles.amax((1, 3)), tiles.amin((1, 3)))
        # Magnitudes as integers: torch takes the largest of few floats three times as slowly.
        bits = torch.bitwise_and(tiles.view(torch.int32), 0x7FFFFFFF, out=bits)
        largest = bits.amax(3) if tiles.shape[1] == 1 else bits.amax((1, 3), keepdim=True)
        return cls(largest.view(tiles.shape[0], tiles.shape[2]).view(torch.float32))

    def columns(self, tiles: slice) -> Extremes:
        """Return the extremes of some columns of tiles."""
        smallest = None if self.smallest is None else self.smallest[:, tiles]
        return Extremes(self.largest[:, tiles], smallest)

    def or_more(self, other: Extremes) -> Extremes:
        """Return the extremes of both."""
        largest = torch.maximum(self.largest, other.largest)
        if self.smallest is None or other.smallest is None:
            return Extremes(largest)
        return Extremes(largest, torch.minimum(self.smallest, other.smallest))


@lru_cache
def element_range(element: str) -> tuple[float, float]:
    """Return the smallest and the largest value of an element format."""
    if element in CONVENTIONS:
        return CONVENTIONS[element].low, CONVENTIONS[element].high
    if element.startswith("uint"):
        return 0.0, float(2 ** int(element[4:]) - 1)
    if element.startswith("int"):
        half = 2 ** (int(element[3:]) - 1)
        return float(-half), float(half - 1)
    return -get(element).max, get(element).max


def element_codes(weight: QuantizedWeight) -> list[float]:
    """List the elements that a format of up to 4 bits has, in the type that they are stored in."""
    if weight.element == "fp4_e2m1":
        codes = [float(value) / weight.unit for value in get(weight.element).values()]
    elif weight.element in ("int4", "uint4", "int2", "uint2"):
        low, high = element_range(weight.element)
        codes = [float(code) for code in range(int(low), int(high) + 1)]
    else:
        return []
    # Integers that are compared with a float would be widened first.
    return codes if weight.elements.is_floating_point() else [int(code) for code in codes]


def round_to(element: str, x: Tensor) -> Tensor:
    """Round to the nearest value of an element format, and saturate."""
    return write_rounded(element, x, torch.empty_like(x))


def write_rounded(element: str, x: Tensor, out: Tensor, bits: Tensor | None = None) -> Tensor:
    """Write float32 numbers as `round_to` rounds them; `bits` is memory for as many integers."""
    low, high = element_range(element)
    x = torch.clamp(x, low, high, out=out)
    convention = CONVENTIONS.get(element)
    if convention is not None and convention.levels:
        return x.copy_(to_levels(convention.levels, x))
    if convention is not None or element.startswith(("int", "uint")):
        return x.round_()
    smallest, more = _exponents(element)
    bits = torch.bitwise_and(x.view(torch.int32), FLOAT32_EXPONENT, out=bits)
    # The last bit of this number is the unit to round to: adding it does.
    power = bits.clamp_(min=smallest).add_(more).view(torch.float32)
    return x.add_(power).sub_(power)


@lru_cache
def _exponents(element: str) -> tuple[int, int]:
    """Return the smallest exponent of a float format, and how much larger 1.5 powers are, as bits.

    The powers have their last bit where a number of that exponent has its last one in the format.
    """
    fmt = get(element).element
    assert isinstance(fmt, FloatFormat)
    return fmt.min_exponent + 127 << 23, (23 - fmt.mantissa << 23) + (1 << 22)


def ideal_values(weight: QuantizedWeight, parent: Tensor) -> tuple[Tensor, Tensor]:
    """Return what an ideal quantizer of the same elements and tiles makes of the parent.

    Its scales are returned, too, one per tile.
    """
    tiles = weight.in_tiles(parent).contiguous()
    if weight.element in CONVENTIONS:
        of_tiles, ideal = CONVENTIONS[weight.element].ideal(tiles[:, 0])
        return weight.from_tiles(of_tiles[:, None]), ideal
    has_zero_points = weight.zero_points is not None
    scales, zeros = ideal_scales(weight, Extremes.of(tiles, signed=has_zero_points))
    spread = scales[:, None, :, None]
    if zeros is None:
        values = round_to(weight.element, tiles / spread).mul_(spread)
    else:
        shift = zeros[:, None, :, None]
        values = round_to(weight.element, tiles / spread + shift).sub_(shift).mul_(spread)
    return weight.from_tiles(values), scales


def ideal_scales(weight: QuantizedWeight, extremes: Extremes) -> tuple[Tensor, Tensor | None]:
    """Return the scales, and the zero points of a weight that has them, of an ideal quantizer."""
    low, high = element_range(weight.element)
    if weight.element == "int32":
        # Sums of products: their scale is that of the inputs times the weight's.
        return torch.where(weight.scales > 0, weight.scales, 1.0), None
    if extremes.smallest is None:
        return _symmetric_scales(weight, extremes.largest, high), None
    smallest, largest = extremes.smallest.clamp(max=0), extremes.largest.clamp(min=0)
    if weight.is_symmetric:
        largest = torch.maximum(largest, -smallest)
        smallest = -largest
    scales = ((largest - smallest) / (high - low)).clamp(min=torch.finfo(torch.float32).tiny)
    if weight.is_symmetric:
        return scales, torch.full_like(scales, (low + high + 1) / 2)
    return scales, (low - smallest / scales).round().clamp(low, high)


def _symmetric_scales(weight: QuantizedWeight, amax: Tensor, largest: float) -> Tensor:
    codes = weight.scale_codes
    if codes is None:
        scales = amax / largest
    elif codes.dtype == torch.uint8:
        # The scale rule of MX: the exponent of the largest magnitude less that of the element's.
        _, exponents = torch.frexp(amax)
        _, top = math.frexp(largest)
        scales = decode_e8m0((exponents - top + 127).clamp(0, 254).to(torch.uint8))
    else:
        # NVFP4: block scales in E4M3, times the scale of the whole tensor that is stored.
        stored = widen(codes)
        whole = (weight.scales / stored).amax()
        if not bool(stored.amin() > 0) or not bool(whole.isfinite()):
            whole = torch.where(stored > 0, weight.scales / stored, 0.0).nan_to_num(0, 0, 0).amax()
        whole = whole if bool(whole > 0) else torch.tensor(1.0)
        scales = round_to("fp8_e4m3", amax / largest / whole) * whole
    return scales if bool(scales.amin() > 0) else torch.where(scales > 0, scales, 1.0)
