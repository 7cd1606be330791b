"""Numbers as people read them."""

from __future__ import annotations

import math


def brief(value: float, digits: int = 3) -> str:
    """Three digits, with a power of ten, and then with `digits`, only where it would be long."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{float(f'{value:.3g}'):g}"
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}"
