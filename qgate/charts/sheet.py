"""Sheets with their sentence, axes and names that stay readable: the base of all pictures."""

from __future__ import annotations

import functools
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from qgate.charts.figure import DPI, HEADLINE, SMALL, TICK, new_figure, render_image, save
from qgate.charts.inline import inline_svg
from qgate.charts.palette import BLACK, COLORS, FORMAT_COLORS, INK, WHITE, format_color
from qgate.text import brief, distinct, one_line, shortened, shortened_title
from qgate.text.format_names import FORMAT_ALIASES

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.ticker import Formatter

Record = TypeVar("Record")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MOST_ROWS = 40


@dataclass(frozen=True)
class Sheet:
    """A finished figure, and the sentence above it: what it shows, with the number."""

    figure: Figure
    title: str

    def save(self, path: Path | str, *, dpi: float = DPI) -> None:
        """Write the picture; the ending of the path is its format."""
        with np.errstate(all="ignore"):
            save(self.figure, Path(path), dpi=dpi)

    @property
    def width(self) -> int:
        """Return how many points wide it is."""
        return round(72 * self.figure.get_figwidth())

    def svg(self) -> str:
        """Return the picture as an element of a page, in the colors of its theme."""
        return inline_svg(self.figure, self.title)

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        with np.errstate(all="ignore"):
            render_image(self.figure).save(data, format="png")
        return data.getvalue()


@dataclass(frozen=True)
class Drawing(Generic[Record]):
    """Draws one picture of a record; does nothing where the record has nothing for it."""

    build: Callable[[Record], Sheet | None]

    def __call__(self, path: Path, record: Record, *, dpi: float = DPI) -> str:
        """Return the title of the picture; empty where there was nothing to draw."""
        sheet = self.sheet(record)
        if sheet is None:
            return ""
        sheet.save(path, dpi=dpi)
        return sheet.title

    def sheet(self, record: Record) -> Sheet | None:
        """Draw the picture; None where there is nothing to draw."""
        with np.errstate(all="ignore"):
            return self.build(record)


def sheet(width: float, height: float, title: str, *, color: str = BLACK) -> Sheet:
    """Make an empty figure with its sentence, in as many lines as it needs."""
    figure = new_figure(width, height)
    lines = _balanced(one_line(title), int(width * 9.2))
    figure.suptitle(
        "\n".join(plain(line, 400) for line in lines), x=0.012, ha="left", fontsize=HEADLINE,
        weight="bold", color=color,
    )  # fmt: skip
    return Sheet(figure, title)


def _balanced(text: str, width: int) -> list[str]:
    """Break a text into as few lines as the width allows, all of about the same length."""
    lines = textwrap.wrap(text, width) or [""]
    narrower = lines
    while len(lines) > 1 and len(narrower) == len(lines):
        lines, width = narrower, width - 2
        narrower = textwrap.wrap(text, max(width, 10)) if width > 10 else []
    return lines


def columns_for(count: int) -> int:
    """Return how many panels go side by side: three, but four make a square."""
    return 2 if count == 4 else min(3, count)


def panels(page: Sheet, count: int, columns: int) -> list[Axes]:
    """Add so many axes in rows, filled from the left; none is empty."""
    grid = page.figure.add_gridspec(-(-count // columns), columns)
    return [page.figure.add_subplot(grid[i // columns, i % columns]) for i in range(count)]


@functools.cache
def _drawable() -> frozenset[int]:
    """Return the characters that the font of all texts has."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties())).get_charmap())


def plain(text: object, most: int = 40) -> str:
    """Escape a name so that matplotlib draws it letter by letter: no formula, and a box for each
    letter that its font lacks."""
    clean = "".join(char if ord(char) in _drawable() else "□" for char in one_line(text))
    return shortened(clean, most).replace("$", r"\$")


def two_lines(text: object, width: int) -> str:
    """Break a longer name into two lines: that of a tensor after its first comma, where the
    beginning of its module is left out if it is too long."""
    first, comma, end = one_line(text).partition(", ")
    if comma:
        lines = [shortened_title(first, width), end]
    else:
        clean = shortened(text, 2 * width)
        lines = textwrap.wrap(clean, width)
        lines = lines if len(lines) < 3 else [clean[:width], clean[width:]]
    return "\n".join(plain(part, width) for part in lines if part) or " "


def colors_for(names: Iterable[str]) -> dict[str, str]:
    """Assign one color to each name; only the first eight differ."""
    return {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}


def markers_for(names: Iterable[str]) -> dict[str, str]:
    return {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(names)}


def format_colors(names: Iterable[str]) -> dict[str, str]:
    return {name: format_color(name) for name in names}


def format_markers(names: Iterable[str]) -> dict[str, str]:
    """Assign one marker to each format, the same in every picture."""
    order = list(FORMAT_COLORS)
    numbers = {name: order.index(name) if name in order else len(name) for name in names}
    return {name: MARKERS[number % len(MARKERS)] for name, number in numbers.items()}


def type_colors(names: Iterable[str]) -> dict[str, str]:
    """Give quant types the color of the format that they spell, and others the unused colors."""
    formats = {name: FORMAT_ALIASES.get(name, name) for name in names}
    colors = {name: FORMAT_COLORS[fmt] for name, fmt in formats.items() if fmt in FORMAT_COLORS}
    unused = [color for color in COLORS if color not in colors.values()] or list(COLORS)
    unspelled = [name for name in formats if name not in colors]
    colors |= {name: unused[i % len(unused)] for i, name in enumerate(unspelled)}
    return {name: colors[name] for name in formats}


def name_rows(axes: Axes, names: Sequence[str], most: int = 40) -> None:
    """Name one row each, the first on top; no two names are the same."""
    texts = distinct([plain(name, most) for name in names])
    axes.set_yticks(range(len(names)), texts, fontsize=TICK)
    axes.set_ylim(len(names) - 0.45, -0.55)


def height_for(rows: int, row_height: float = 0.3, least: float = 2.6) -> float:
    return max(least, 1.6 + row_height * rows)


def _brief_ticks() -> Formatter:
    """Name ticks as people write numbers."""
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: brief(value))


def log_axis(axes: Axes, which: str) -> None:
    """Make an axis logarithmic, with few ticks."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(numticks=7))
    low, high = sorted(getattr(axes, f"get_{which}lim")())
    decades = math.log10(high / low) if 0 < low < high else 0.0
    if decades < 0.9:
        axis.set_major_locator(MaxNLocator(5))
    elif decades < 1.8:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
    axis.set_major_formatter(_brief_ticks())
    axis.set_minor_locator(NullLocator())


def share_axis(axes: Axes, which: str = "x") -> None:
    """Make an axis of shares logarithmic, in percent."""
    from matplotlib.ticker import FuncFormatter

    log_axis(axes, which)
    getattr(axes, f"{which}axis").set_major_formatter(
        FuncFormatter(lambda value, _: f"{brief(100 * value)} %" if value <= 1.0001 else "")
    )


def whole_numbers(axes: Axes, which: str = "x", most: int = 12) -> None:
    from matplotlib.ticker import MaxNLocator

    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10]))


def signed_log(axes: Axes, which: str, unit: float) -> None:
    """Make an axis linear up to `unit` on either side of zero and logarithmic beyond it, with at
    most seven ticks."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

    axis = getattr(axes, f"{which}axis")
    low, high = sorted(getattr(axes, f"get_{which}lim")())
    decades = math.log10(max(abs(low), abs(high), unit) / unit)
    if decades < 1:
        axis.set_major_locator(MaxNLocator(6))
        axis.set_major_formatter(_brief_ticks())
        return
    scale = max(0.6, 0.22 * decades)
    getattr(axes, f"set_{which}scale")("symlog", linthresh=unit, linscale=scale)
    low, high = sorted(getattr(axes, f"get_{which}lim")())
    first = math.floor(math.log10(unit) + 1e-9)
    last = max(first, math.ceil(math.log10(max(abs(low), abs(high), unit)) - 1e-9))
    step = max(1, math.ceil((last - first + 1) / 3))
    powers = [10.0**power for power in range(first, last + 1, step)]
    ticks = [*(-power for power in reversed(powers)), 0.0, *powers]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(_brief_ticks())


def legend(
    page: Sheet, entries: Mapping[str, Artist], *, title: str = "", columns: int = 6
) -> None:
    """Write the legend below all panels, where it hides nothing."""
    if not entries:
        return
    figure = page.figure
    longest = min(max(len(name) for name in entries), 44)
    room = int(figure.get_figwidth() * 11 / (longest + 7))
    rows = -(-len(entries) // max(1, min(columns, room)))
    figure.set_figheight(figure.get_figheight() + 0.2 * (rows - 1))
    figure.legend(
        list(entries.values()), [f" {plain(name, 44)}" for name in entries],
        loc="outside lower left", ncols=-(-len(entries) // rows), fontsize=TICK, frameon=False,
        title=title or None, title_fontsize=TICK, handletextpad=0.4, alignment="left",
    )  # fmt: skip


def color_bar(
    page: Sheet, image: AxesImage, axes: Axes | list[Axes], label: str, **more: object
) -> None:
    """Draw a color bar beside the panels."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    bar = page.figure.colorbar(image, ax=axes, pad=0.01, aspect=30, **more)  # type: ignore[arg-type]
    low, high = image.get_clim()
    if type(image.norm).__name__ == "LogNorm" and low is not None and high is not None:
        decades = math.log10(high / low)
        narrow = MaxNLocator(5) if decades < 0.9 else LogLocator(subs=(1.0, 2.0, 5.0), numticks=9)
        bar.locator = LogLocator(numticks=7) if decades >= 1.8 else narrow
        bar.formatter = _brief_ticks()
        bar.update_ticks()
        bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.set_label(label, fontsize=TICK)
    bar.ax.tick_params(labelsize=SMALL)
    bar.outline.set_visible(False)


def patch(color: str, **more: object) -> Artist:
    from matplotlib.patches import Patch

    return Patch(facecolor=color, **more)  # type: ignore[arg-type]


def line(color: str, marker: str = "", **more: object) -> Artist:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, marker=marker, **more)  # type: ignore[arg-type]


def dots(axes: Axes, x: object, y: object, color: str, marker: str, **more: object) -> None:
    """Draw points with a thin light edge, which separates those that touch."""
    style: dict[str, object] = {"s": 22, "edgecolors": WHITE, "linewidths": 0.4, **more}
    axes.scatter(x, y, color=color, marker=marker, **style)  # type: ignore[arg-type]


def quartile_boxes(
    axes: Axes, quartiles: Sequence[dict[str, float]], positions: Sequence[float],
    colors: Sequence[str], *, width: float = 0.6, vertical: bool = False,
) -> None:  # fmt: skip
    """Draw boxes by their quartiles and the ends of their whiskers, as `Axes.bxp` names them."""
    parts = axes.bxp(
        quartiles, positions=positions, orientation="vertical" if vertical else "horizontal",
        widths=width, showfliers=False, patch_artist=True, manage_ticks=False,
        medianprops={"color": BLACK, "linewidth": 1.3},
    )  # fmt: skip
    for box, color in zip(parts["boxes"], colors, strict=True):
        box.set(facecolor=color, alpha=0.75)


def boxes_of(
    axes: Axes, rows: Sequence[Sequence[float]], positions: Sequence[float], colors: Sequence[str],
    *, width: float = 0.6, vertical: bool = False,
) -> None:  # fmt: skip
    """Draw a box of the quartiles of each row, with whiskers to the extremes."""
    cuts = [np.quantile(np.asarray(row, dtype=np.float64), (0, 0.25, 0.5, 0.75, 1)) for row in rows]
    names = "whislo", "q1", "med", "q3", "whishi"
    quartiles = [dict(zip(names, row, strict=True)) for row in cuts]
    quartile_boxes(axes, quartiles, positions, colors, width=width, vertical=vertical)


def note(axes: Axes, text: str, *, x: float = 0.98, y: float = 0.96) -> None:
    """Write into a corner of a panel."""
    axes.text(
        x, y, text, transform=axes.transAxes, fontsize=SMALL, color=INK,
        ha="right" if x > 0.5 else "left", va="top" if y > 0.5 else "bottom",
    )  # fmt: skip
