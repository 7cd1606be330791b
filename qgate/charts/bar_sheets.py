"""Named numbers as bars, for results that show themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qgate.charts.figure import dress
from qgate.charts.palette import BLUE
from qgate.charts.shapes import bars
from qgate.charts.sheet import Sheet, height_for, name_rows, panels, sheet


def bar_sheet(
    title: str, label: str, names: Sequence[str], values: Sequence[float], texts: Sequence[str]
) -> Sheet:
    """Draw a bar for each number, with its text beside it; none for one that is not finite."""
    picture = sheet(9, height_for(len(names)), title)
    (axes,) = panels(picture, 1, 1)
    widths = [value if math.isfinite(value) else 0.0 for value in values]
    bars(axes, widths, texts, BLUE)
    name_rows(axes, names)
    axes.margins(x=0.15)
    dress(axes, x=label, grid="x")
    return picture
