"""What the format that a run is labeled with would lose of a tensor: shares of its finite elements.

Of a format whose values stand alone, unscaled and from the counts; of an MX format with the scale
of each block. Other formats scale a whole tensor or channel in ways that a label does not tell.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from qgate.collecting.blocks import Blocks
from qgate.collecting.figures import Figures
from qgate.collecting.values import value_table
from qgate.errors import QgateError
from qgate.formats import FORMATS, ElementFormat
from qgate.formats.losses import Losses, losses_of_values
from qgate.formats.mx import MxFormat, mx_format
from qgate.stats.bits import BY_NAME

_FORMATS = {"hifp8": "hif8", "hif8": "hif8", "fp8": "fp8_e4m3", "mxfp6": "mxfp6_e3m2"}


@lru_cache(maxsize=16)
def _format(label: str) -> ElementFormat | MxFormat | None:
    try:
        found = FORMATS.get(_FORMATS.get(label.lower(), label.lower()))
    except QgateError:
        return None
    if found.kind == "block":
        return mx_format(found)
    return None if found.always_scaled else found


def shares_of(label: str, found: Figures, blocks: Blocks | None) -> dict[str, float]:
    """Return the shares of the finite values that saturate in the format and that it flushes."""
    fmt = _format(label) if label else None
    if fmt is None:
        return {}
    if fmt.kind == "block":
        losses = None if blocks is None else blocks.losses(fmt)
    else:
        losses = _losses_of_cast(fmt, found)
    if losses is None or not losses.finite:
        return {}
    return {
        f"{fmt.name}.saturated_share": losses.saturated_share,
        f"{fmt.name}.flushed_share": losses.flushed_share,
    }


def _losses_of_cast(fmt: ElementFormat, found: Figures) -> Losses | None:
    if found.counts is None:
        return None
    values = value_table(BY_NAME[found.counted_as])[found.counts["patterns"]]
    losses = losses_of_values(fmt, values, found.counts["counts"].astype(np.int64))
    return losses.before_rounding(found.nonfinite["posinf"], found.nonfinite["neginf"])
