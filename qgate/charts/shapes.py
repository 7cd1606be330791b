"""Parts of pictures that many share: tiles, rows of boxes, bars, maps, steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qgate.charts.figure import SMALL, dress
from qgate.charts.palette import BLACK, GRAY, MAP, ON_PALE, WHITE
from qgate.charts.sheet import (
    Sheet,
    boxes_of,
    height_for,
    line,
    log_axis,
    name_rows,
    panels,
    patch,
    plain,
    sheet,
    signed_log,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm
    from matplotlib.image import AxesImage

Floats = npt.NDArray[np.float64]
Array = npt.NDArray[Any]


# Sheets ------------------------------------------------------------------------------------------


def single(title: str, width: float, height: float) -> tuple[Sheet, Axes]:
    """Make a sheet of one panel."""
    page = sheet(width, height, title)
    return page, page.figure.subplots()


def tiles(
    title: str, count: int, size: tuple[float, float],
    *, columns: int = 3, extra: float = 1.0, least: float = 6.4,
) -> tuple[Sheet, list[Axes]]:  # fmt: skip
    """Make a sheet of so many panels of one size in rows, the legend in the `extra` height."""
    columns = min(columns, count)
    rows = -(-count // columns)
    page = sheet(max(size[0] * columns, least), size[1] * rows + extra, title)
    return page, panels(page, count, columns)


@dataclass(frozen=True)
class NumberColumn:
    """Numbers of each row under one label; with a `unit`, the axis is logarithmic beyond it."""

    label: str
    rows: Sequence[Sequence[float]]
    unit: float | None = None


def row_columns(
    title: str, names: Sequence[str], columns: Sequence[NumberColumn],
    draw: Callable[[Axes, int, list[int], list[Sequence[float]]], None],
    *, width: float, height: float = 0.32, air: float = 0.06, grid: str = "x",
) -> Sheet:  # fmt: skip
    """Make a sheet of named rows in several columns; `draw` gets a panel, the number of its column,
    the rows that have numbers, and these numbers."""
    page = sheet(width, height_for(len(names), height), title)
    row_of_axes = page.figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for number, (axes, column) in enumerate(zip(row_of_axes, columns, strict=True)):
        rows = [row for row, numbers in enumerate(column.rows) if numbers]
        draw(axes, number, rows, [column.rows[row] for row in rows])
        axes.margins(x=air)
        if column.unit is None:
            log_axis(axes, "x")
        else:
            signed_log(axes, "x", column.unit)
        dress(axes, x=column.label, grid=grid)
        if number == 0:
            name_rows(axes, names)
        else:
            axes.tick_params(labelleft=False)
    return page


# Legends and words -------------------------------------------------------------------------------


def keys(
    colors: Mapping[str, str], markers: Mapping[str, str] | None = None, **more: object
) -> dict[str, Artist]:
    """Return legend entries of lines; of dots, where there are markers and no other style."""
    if markers is not None and not more:
        more = {"linestyle": "none"}
    return {n: line(color, (markers or {}).get(n, ""), **more) for n, color in colors.items()}


def patches(colors: Mapping[str, str]) -> dict[str, Artist]:
    """Return legend entries of areas."""
    return {name: patch(color) for name, color in colors.items()}


def part_of(count: int, total: int | str, which: str, noun: str = "") -> str:
    """End the title of a picture that shows fewer than there are; empty where it shows all."""
    return "" if count == total else f"; the {count} {which} of {total}{noun and ' ' + noun}"


def beside(
    axes: Axes, text: str, x: float, y: float, dx: float = 4, *, size: float = SMALL, **more: Any
) -> None:
    """Write next to a bar or dot."""
    axes.annotate(
        text, (x, y), (dx, 0), textcoords="offset points", va="center", fontsize=size, **more
    )


# Marks -------------------------------------------------------------------------------------------


def bars(
    axes: Axes, widths: Sequence[float], texts: Sequence[str], color: str | Sequence[str],
    *, rows: Sequence[float] | None = None, height: float = 0.7,
) -> None:  # fmt: skip
    """Draw a bar in each row, with a text beside it."""
    rows = range(len(widths)) if rows is None else rows
    axes.barh(rows, widths, height=height, color=color)
    for row, width, text in zip(rows, widths, texts, strict=True):
        beside(axes, text, width, row)


def steps(
    axes: Axes, heights: Array, edges: Array, color: str, alpha: float, width: float = 1.5
) -> None:
    """Draw a histogram as an outline on a pale area."""
    axes.stairs(heights, edges, color=color, linewidth=width)
    axes.stairs(heights, edges, color=color, alpha=alpha, fill=True)


def diagonal(axes: Axes, low: float, high: float, **more: Any) -> None:
    """Draw where both axes are equal."""
    axes.plot([low, high], [low, high], **{"color": GRAY, "linewidth": 1, **more})


def log_heights(axes: Axes, heights: Floats, below: float, above: float) -> None:
    """Make the axis of densities logarithmic, with air around the positive ones."""
    positive = heights[heights > 0]
    axes.set_yscale("log")
    axes.set_ylim(float(positive.min()) / below, float(positive.max()) * above)
    log_axis(axes, "y")


def standing_boxes(
    axes: Axes, values: Mapping[str, Sequence[float]], colors: Mapping[str, str], label: str,
    *, most: int = 12,
) -> None:  # fmt: skip
    """Draw a named box of each list of numbers, side by side."""
    positions = range(len(values))
    boxes_of(axes, list(values.values()), positions, [colors[n] for n in values], vertical=True)
    axes.set_xticks(positions, [plain(name, most) for name in values])
    axes.set_xlim(-0.6, len(values) - 0.4)
    axes.margins(y=0.06)
    dress(axes, y=label, grid="y")


# Maps --------------------------------------------------------------------------------------------


def log_norm(low: float, high: float, *, clip: bool = False) -> LogNorm:
    """Assign colors by powers of ten."""
    from matplotlib.colors import LogNorm

    return LogNorm(low, high, clip=clip)


def cell_map(axes: Axes, cells: npt.ArrayLike, **more: Any) -> AxesImage:
    """Draw cells by color; NaN stays white."""
    return axes.imshow(cells, **{"cmap": MAP, "aspect": "auto", "interpolation": "nearest", **more})


def write_cells(
    axes: Axes, cells: Floats, name: Callable[[float], str], black: Callable[[float], bool],
    *, is_log: bool = False,
) -> None:  # fmt: skip
    """Write the figures of a small map into its cells, in black or white.

    On a logarithmic scale zeros have no color: they stand on the ground.
    """
    for (row, column), value in np.ndenumerate(cells):
        if math.isfinite(value):
            on_color = ON_PALE if black(float(value)) else WHITE
            axes.text(
                column, row, name(float(value)), ha="center", va="center", fontsize=SMALL,
                color=BLACK if is_log and value == 0 else on_color,
            )  # fmt: skip
