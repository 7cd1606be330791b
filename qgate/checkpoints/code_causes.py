"""Name what is wrong with the codes of a weight and of its scales, whatever the parent is."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qgate.checkpoints.compute import element_range
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.record import WeightFigures
from qgate.formats import get

SUBNORMAL_SHARE = 0.1
"""Share of subnormal scales in E4M3 that right exporters stay under."""
UNUSED_SHARE = 0.3
"""Share of codes without an element that right exporters stay under."""
MANY_SCALES, MANY_ELEMENTS = 64, 4096
"""Scales and elements from which on the largest values of groups have the codes at the ends."""


def code_causes(weight: QuantizedWeight, figures: WeightFigures) -> Iterator[str]:
    """Name scales with fewer bits, zero points that are no codes, and codes that never occur."""
    count = weight.scales.numel()
    subnormal = _count_subnormal(weight.scale_codes)
    if subnormal > SUBNORMAL_SHARE * count:
        yield (
            f"{subnormal:,} of {count:,} scales are subnormal in E4M3: the scale of the whole "
            "tensor does not fit them"
        )
    outside = _count_outside(weight)
    if outside:
        yield f"{outside:,} zero points are no codes of the elements"
    is_sampled = figures.count > MANY_ELEMENTS and count >= MANY_SCALES
    codes = _count_values(weight.element)
    if is_sampled and figures.unused_codes > UNUSED_SHARE * codes:
        yield f"{figures.unused_codes} of {codes} codes never occur"


def _count_subnormal(codes: Tensor | None) -> int:
    """Count E4M3 codes below the smallest normal value, but not zeros."""
    if codes is None or codes.dtype != torch.float8_e4m3fn:
        return 0
    magnitudes = codes.contiguous().view(torch.uint8) & 0x7F
    return int(((magnitudes > 0) & (magnitudes < 8)).sum())


def _count_outside(weight: QuantizedWeight) -> int:
    """Count whole zero points that are no codes; those with fractions are stored minima."""
    zeros = weight.zero_points
    if zeros is None or not bool((zeros == zeros.round()).all()):
        return 0
    low, high = element_range(weight.element)
    return int(((zeros < low) | (zeros > high)).sum())


def _count_values(element: str) -> int:
    if element.startswith(("int", "uint")):
        return 1 << int(element.removeprefix("u").removeprefix("int"))
    return len(set(get(element).values().tolist()))
