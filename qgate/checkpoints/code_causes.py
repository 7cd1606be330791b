"""Name what is wrong with the codes of a weight and of its scales, whatever the parent is."""

from __future__ import annotations

from collections.abc import Iterator

from qgate.checkpoints.conventions import CONVENTIONS
from qgate.checkpoints.record import WeightFigures
from qgate.formats import get

SUBNORMAL_SHARE = 0.1
"""Share of subnormal scales in E4M3 that right exporters stay under."""
UNUSED_SHARE = 0.3
"""Share of codes without an element that right exporters stay under."""
MANY_SCALES, MANY_ELEMENTS = 64, 4096
"""Scales and elements from which on the largest values of groups have the codes at the ends."""


def code_causes(element: str, figures: WeightFigures) -> Iterator[str]:
    """Name scales with fewer bits, zero points that are no codes, and codes that never occur."""
    count = figures.scales.count
    subnormal = figures.subnormal_scales
    if subnormal > SUBNORMAL_SHARE * count:
        yield (
            f"{subnormal:,} of {count:,} scales are subnormal in E4M3: the scale of the whole "
            "tensor does not fit them"
        )
    if figures.outside_zero_points:
        yield f"{figures.outside_zero_points:,} zero points are no codes of the elements"
    if element in CONVENTIONS:
        return  # code books have codes that right exporters leave out
    is_sampled = figures.count > MANY_ELEMENTS and count >= MANY_SCALES
    if is_sampled and figures.unused_codes:
        codes = _count_values(element)
        if figures.unused_codes > UNUSED_SHARE * codes:
            yield f"{figures.unused_codes} of {codes} codes never occur"


def _count_values(element: str) -> int:
    if element.startswith(("int", "uint")):
        return 1 << int(element.removeprefix("u").removeprefix("int"))
    return len(set(get(element).values().tolist()))
