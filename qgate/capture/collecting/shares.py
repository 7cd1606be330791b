"""What the format that a run is labeled with would lose of a tensor: a share of its elements.

Of a format whose values stand alone, unscaled and from the counts; of an MX format with the scale
of each block. Other formats scale a whole tensor or channel in ways that a label does not tell.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from qgate.capture.collecting.blocks import Blocks
from qgate.capture.collecting.figures import Figures
from qgate.capture.collecting.values import value_table
from qgate.errors import QgateError
from qgate.stats._bits import BY_NAME

if TYPE_CHECKING:
    from qgate.formats._element import ElementFormat
    from qgate.formats.mx import MxFormat

_FORMATS = {"hifp8": "hif8", "hif8": "hif8", "fp8": "fp8_e4m3", "mxfp6": "mxfp6_e3m2"}


@lru_cache(maxsize=16)
def _format(label: str) -> ElementFormat | MxFormat | None:
    from qgate.formats import FORMATS
    from qgate.formats._element import ElementFormat
    from qgate.formats.mx import MxFormat

    try:
        found = FORMATS.get(_FORMATS.get(label.lower(), label.lower()))
    except QgateError:
        return None
    if isinstance(found, MxFormat):
        return found
    if isinstance(found, ElementFormat) and not found.name.startswith("int"):
        return found
    return None


def shares_of(label: str, found: Figures, blocks: Blocks | None) -> dict[str, float]:
    """Shares of the finite values that are beyond the largest of the format, and that are not zero
    and become zero."""
    from qgate.formats.mx import MxFormat

    fmt = _format(label) if label else None
    if isinstance(fmt, MxFormat):
        return {} if blocks is None else blocks.shares(fmt)
    return {} if fmt is None else _unscaled(fmt, found)


def _unscaled(fmt: ElementFormat, found: Figures) -> dict[str, float]:
    if found.counts is None:
        return {}
    table = np.abs(value_table(BY_NAME[found.counted_as])[found.counts["patterns"]])
    there = np.isfinite(table)
    sizes, weights = table[there], found.counts["counts"][there].astype(np.float64)
    total = weights.sum()
    if not total:
        return {}
    least = fmt.min_subnormal / 2
    lost = (sizes > 0) & ((sizes < least) | ((sizes == least) & (fmt.rounding == "even")))
    return {
        f"{fmt.name}.saturated_share": float(weights[sizes > fmt.max].sum() / total),
        f"{fmt.name}.zeroed_share": float(weights[lost].sum() / total),
    }
