"""What the format that a run is labeled with would lose of a tensor, from its counts."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from qgate.capture.collect_figures import Figures
from qgate.capture.collect_values import value_table
from qgate.stats._bits import BY_NAME

if TYPE_CHECKING:
    from qgate.formats._element import ElementFormat

_FORMATS = {"hifp8": "hif8", "fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}


@lru_cache(maxsize=16)
def _format(label: str) -> ElementFormat | None:
    """Floating-point formats whose values stand alone: others are never used without a scale."""
    from qgate.formats import FORMATS
    from qgate.formats._element import ElementFormat

    name = _FORMATS.get(label.lower(), label.lower())
    found = FORMATS.get(name) if name in FORMATS.names() else None
    if isinstance(found, ElementFormat) and not found.name.startswith("int"):
        return found
    return None


def shares(label: str, found: Figures) -> dict[str, float]:
    """Shares of the finite values beyond the largest of the format, and, of those that are not
    zero, below half of its smallest; unscaled."""
    fmt = _format(label) if label else None
    if fmt is None or found.counts is None:
        return {}
    table = np.abs(value_table(BY_NAME[found.counted_as])[found.counts["patterns"]])
    there = np.isfinite(table)
    sizes, weights = table[there], found.counts["counts"][there].astype(np.float64)
    total = weights.sum()
    if not total:
        return {}
    lost = (sizes > 0) & (sizes < fmt.min_subnormal / 2)
    return {
        f"{fmt.name}.saturated_share": float(weights[sizes > fmt.max].sum() / total),
        f"{fmt.name}.zeroed_share": float(weights[lost].sum() / total),
    }
