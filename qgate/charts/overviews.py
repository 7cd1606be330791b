"""Results that show themselves: a few lines of text, a table and picture in notebooks, a frame.

A result derives from `Overviewed` and describes itself once, by `overview`. Every text of it may
come from other people's models and files: it is cut and escaped here.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from qgate.charts.pages import render
from qgate.errors import QgateError
from qgate.loading import LateModule, explained_imports
from qgate.text import brief, counted, shortened

if TYPE_CHECKING:
    import pandas as pd

    from qgate.charts import bar_sheets
    from qgate.charts.sheet import Sheet
else:
    # Records of runs are read without numpy, which drawing needs.
    bar_sheets = LateModule("qgate.charts.bar_sheets")

Row = Mapping[str, object]
_MOST_LINES, _MOST_ROWS, _MOST_SHOWN, _MOST_BARS = 6, 10, 20, 20
_LINE, _CELL = 140, 44


@dataclass(frozen=True)
class Overview:
    """A result in short.

    title    what it is and what it says, in one line
    items    what the rows of its table are of, the worst first
    row_of   makes the row of an item: the names of columns and what is in them
    noun     names an item
    lines    further sentences
    drawn    the column that is drawn as bars, empty for none
    """

    title: str
    items: Sequence[Any] = ()
    row_of: Callable[[Any], Row] = dict
    noun: str = "row"
    lines: Sequence[str] = ()
    drawn: str = ""

    def rows(self, most: int | None = None) -> list[dict[str, object]]:
        """Return the first rows, or all of them."""
        return [dict(self.row_of(item)) for item in self.items[:most]]

    def more(self, most: int) -> str:
        """Count the rows beyond the first; empty if there are none."""
        count = len(self.items) - most
        return f"… and {counted(count, self.noun)} more" if count > 0 else ""


class Overviewed:
    """A result that shows itself in at most 20 lines, and in a notebook as table and picture."""

    def overview(self) -> Overview:
        """Describe the result in short."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return "\n".join(_text_lines(self.overview()))

    def _repr_html_(self) -> str:
        overview, picture = self.overview(), self._draw()
        image = base64.b64encode(picture._repr_png_()).decode("ascii") if picture else ""
        rows = overview.rows(_MOST_SHOWN)
        return render(
            "charts/overview",
            title=shortened(overview.title, 2 * _LINE),
            lines=[shortened(line, 2 * _LINE) for line in overview.lines[:_MOST_LINES]],
            head=list(rows[0]) if rows else [],
            rows=[[_cell(cell) for cell in row.values()] for row in rows],
            more=overview.more(_MOST_SHOWN),
            image=image,
            alt=picture.title if picture else "",
        )

    def to_frame(self) -> pd.DataFrame:
        """Return all rows of the table as a data frame."""
        return frame_of(self.overview().rows())

    def plot(self) -> Sheet:
        """Draw the result; a notebook shows it, and `.figure` is its matplotlib figure."""
        picture = self._draw()
        if picture is None:
            raise QgateError(
                f"there is nothing to draw: {shortened(self.overview().title, _LINE)}."
            )
        return picture

    def _draw(self) -> Sheet | None:
        overview = self.overview()
        return overview_bars(overview) if overview.drawn else None


def frame_of(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Make a data frame of rows; it cannot hold lone surrogates of names, which are escaped."""
    with explained_imports():
        import pandas as pd

    return pd.DataFrame([{name: _whole(value) for name, value in row.items()} for row in rows])


def _whole(value: object) -> object:
    return value.encode("utf-8", "backslashreplace").decode() if type(value) is str else value


def overview_bars(overview: Overview) -> Sheet | None:
    """Draw the first rows as bars, named by the first column; None without a finite number."""
    rows = overview.rows(_MOST_BARS)
    cells = [row[overview.drawn] for row in rows]
    values = [float(cell) if _is_number(cell) else math.nan for cell in cells]
    if not any(map(math.isfinite, values)):
        return None
    names = [str(next(iter(row.values()))) for row in rows]
    texts = [f" {_cell(cell)}" for cell in cells]
    title = shortened(overview.title, _LINE)
    return bar_sheets.bar_sheet(title, overview.drawn, names, values, texts)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return brief(value)
    return f"{value:,}" if type(value) is int else shortened(value, _CELL)


def _text_lines(overview: Overview) -> list[str]:
    lines = [overview.title, *(f"  {line}" for line in overview.lines[:_MOST_LINES])]
    rows = overview.rows(_MOST_ROWS)
    if rows:
        adjusts = [str.rjust if _is_number(cell) else str.ljust for cell in rows[0].values()]
        cells = [list(rows[0]), *([_cell(cell) for cell in row.values()] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            padded = map(lambda adjust, *of: adjust(*of), adjusts, row, widths)
            lines.append(f"  {'  '.join(padded)}".rstrip())
    more = overview.more(_MOST_ROWS)
    lines += [f"  {more}"] if more else []
    return [shortened(line, _LINE) for line in lines]
