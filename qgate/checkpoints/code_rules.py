"""Rules by which codes were rounded at the stored scales, where it was not to the nearest."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight
from qgate.errors import QgateError
from qgate.formats import get
from qgate.formats.definition import round_by_list
from qgate.formats.options import Floats

MOST_ROWS = 64
"""Leading rows that a rule is looked for in."""
LEAST_CUT = 0.005
"""Share of codes beyond the ends from which on they were cut off there."""
MOST_OTHERS = 0.03
"""Share of codes that a rule may leave: the largest of a group of 32 is where a rule cuts off."""


def describe_codes(weight: QuantizedWeight, parent: Tensor) -> str:
    """Name the rule that gives the codes of a weight; empty if it is to the nearest, or unknown."""
    if weight.offsets is not None or weight.blocks is not None:
        return ""
    rows = min(MOST_ROWS, len(weight.elements))
    rows = rows // min(weight.tile[0], rows) * min(weight.tile[0], rows)
    some = weight.rows(0, rows)
    scales = some.spread(some.scales).double().numpy()
    if not bool((scales > 0).all()):
        return ""
    ratios = parent[:rows].double().numpy() / scales
    codes = some.float_elements().double().numpy()
    if weight.element.startswith(("int", "uint")):
        zeros = 0.0 if some.zero_points is None else some.spread(some.zero_points).double().numpy()
        if words := _cut_off(np.rint(ratios + zeros), codes, weight.element):
            return words
    if weight.zero_points is not None:
        return ""
    for words, values in _rules(ratios, weight.element):
        if float((values != codes).mean()) <= MOST_OTHERS:
            return words
    return ""


def _cut_off(nearest: Floats, codes: Floats, element: str) -> str:
    """Name ends within the range of a format, beyond which no code is."""
    low, high = float(codes.min()), float(codes.max())
    bits = int(re.sub(r"\D", "", element))
    least, most = (
        (0.0, 2.0**bits - 1)
        if element[0] == "u"
        else (1 - 2.0 ** (bits - 1), 2.0 ** (bits - 1) - 1)
    )
    within = nearest.clip(least, most)
    is_clipped = (within.clip(low, high) == codes).mean() >= 1 - MOST_OTHERS
    beyond = ((within < low) | (within > high)).mean()
    return (
        f"codes are cut off at {low:g} and {high:g} of {element}"
        if is_clipped and beyond > LEAST_CUT
        else ""
    )


def _rules(ratios: Floats, element: str) -> Iterator[tuple[str, Floats]]:
    try:
        fmt = get(element)
    except QgateError:
        return
    if fmt.kind != "element":
        return
    yield (
        "codes are truncated, not rounded to the nearest",
        round_by_list(ratios, fmt.element, rounding="zero"),
    )
    if not element.startswith("int"):
        return
    low, high = -float(fmt.max) - 1, float(fmt.max)
    for words, rounded in (("down (floor)", np.floor), ("up (ceil)", np.ceil)):
        yield f"codes are rounded {words}, not to the nearest", rounded(ratios).clip(low, high)
    for lost in range(1, fmt.element.bits - 1):
        step, upper = 2.0**lost, fmt.element.bits - lost
        nearest = np.rint(ratios).clip(low, high)
        for values in (np.floor(nearest / step) * step, np.rint(nearest / step) * step):
            yield f"codes keep the upper {upper} of their {fmt.element.bits} bits", values
