"""A column of the overview of a result, as bars."""

from __future__ import annotations

import math

from qgate.charts.figure import dress
from qgate.charts.overviews import LINE, Overview, cell_text, is_number
from qgate.charts.palette import BLUE
from qgate.charts.shapes import bars
from qgate.charts.sheet import Sheet, height_for, name_rows, panels, sheet
from qgate.text import shortened

_MOST_BARS = 20


def bar_sheet(overview: Overview) -> Sheet | None:
    """Draw a bar for each of the first rows, named by the first column; None without a number."""
    rows = overview.rows(_MOST_BARS)
    values = [value if is_number(value := row[overview.drawn]) else math.nan for row in rows]
    if not any(map(math.isfinite, values)):
        return None
    picture = sheet(9, height_for(len(rows)), shortened(overview.title, LINE))
    (axes,) = panels(picture, 1, 1)
    widths = [value if math.isfinite(value) else 0.0 for value in values]
    bars(axes, widths, [f" {cell_text(row[overview.drawn])}" for row in rows], BLUE)
    name_rows(axes, [str(next(iter(row.values()))) for row in rows])
    axes.margins(x=0.15)
    dress(axes, x=overview.drawn, grid="x")
    return picture
