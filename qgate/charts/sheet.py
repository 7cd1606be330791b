"""What all pictures are made of: the sheet with its sentence, axes and names that stay readable."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from qgate.charts.figure import DPI, HEADLINE, SMALL, TICK, new_figure, save
from qgate.charts.palette import (
    BLACK,
    COLORS,
    FORMAT_ALIASES,
    FORMAT_COLORS,
    INK,
    WHITE,
    format_color,
)
from qgate.text import brief, distinct, one_line, shortened, shortened_title

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

Told = TypeVar("Told")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MOST_ROWS = 40


@dataclass(frozen=True)
class Sheet:
    """A figure that is ready, and the sentence above it: what it shows, with the number."""

    figure: Figure
    title: str


@dataclass(frozen=True)
class Drawing(Generic[Told]):
    """Draws one picture of a record; does nothing where the record has nothing for it."""

    build: Callable[[Told], Sheet | None]

    def __call__(self, path: Path, record: Told, *, dpi: float = DPI) -> str:
        """The title of what was drawn; empty where nothing was."""
        with np.errstate(all="ignore"):
            sheet = self.build(record)
            if sheet is None:
                return ""
            save(sheet.figure, path, dpi=dpi)
        return sheet.title


def sheet(width: float, height: float, title: str, *, color: str = BLACK) -> Sheet:
    """An empty figure with its sentence, in as many lines as it needs."""
    figure = new_figure(width, height)
    lines = _balanced(one_line(title), int(width * 9.2))
    figure.suptitle(
        "\n".join(plain(line, 400) for line in lines),
        x=0.012,
        ha="left",
        fontsize=HEADLINE,
        weight="bold",
        color=color,
    )
    return Sheet(figure, title)


def _balanced(text: str, width: int) -> list[str]:
    """As few lines as the width allows, all of about the same length."""
    lines = textwrap.wrap(text, width) or [""]
    narrower = lines
    while len(lines) > 1 and len(narrower) == len(lines):
        lines, width = narrower, width - 2
        narrower = textwrap.wrap(text, max(width, 10)) if width > 10 else []
    return lines


def columns_for(count: int) -> int:
    """How many panels go side by side: three, but four make a square."""
    return 2 if count == 4 else min(3, count)


def panels(made: Sheet, count: int, columns: int) -> list[Axes]:
    """So many axes in rows, filled from the left; none is empty."""
    rows = -(-count // columns)
    grid = made.figure.add_gridspec(rows, columns)
    return [made.figure.add_subplot(grid[i // columns, i % columns]) for i in range(count)]


@functools.cache
def _drawable() -> frozenset[int]:
    """Characters that the font of all texts has."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties())).get_charmap())


def plain(text: object, most: int = 40) -> str:
    """A name as matplotlib draws it letter by letter: no formula, and a box of its own making for
    each letter that its font lacks."""
    clean = "".join(char if ord(char) in _drawable() else "□" for char in one_line(text))
    return shortened(clean, most).replace("$", r"\$")


def wrapped(text: object, width: int) -> str:
    """A longer name in two lines: that of a tensor is broken after its first comma, and what it
    has too much goes from the beginning of its module."""
    first, comma, rest = one_line(text).partition(", ")
    if comma:
        lines = [shortened_title(first, width), rest]
    else:
        clean = shortened(text, 2 * width)
        lines = textwrap.wrap(clean, width)
        lines = lines if len(lines) < 3 else [clean[:width], clean[width:]]
    return "\n".join(plain(part, width) for part in lines if part) or " "


def colors_for(names: Iterable[str]) -> dict[str, str]:
    """One color for each name; only the first eight are told apart."""
    return {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}


def markers_for(names: Iterable[str]) -> dict[str, str]:
    return {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(names)}


def format_colors(names: Iterable[str]) -> dict[str, str]:
    return {name: format_color(name) for name in names}


def format_markers(names: Iterable[str]) -> dict[str, str]:
    """One marker for each format, the same in every picture."""
    known = list(FORMAT_COLORS)
    places = {name: known.index(name) if name in known else len(name) for name in names}
    return {name: MARKERS[place % len(MARKERS)] for name, place in places.items()}


def type_colors(names: Iterable[str]) -> dict[str, str]:
    """Quant types have the color of the format that they spell, and others what is left."""
    told = {name: FORMAT_ALIASES.get(name, name) for name in names}
    found = {name: FORMAT_COLORS[fmt] for name, fmt in told.items() if fmt in FORMAT_COLORS}
    left = [color for color in COLORS if color not in found.values()] or list(COLORS)
    others = [name for name in told if name not in found]
    found |= {name: left[place % len(left)] for place, name in enumerate(others)}
    return {name: found[name] for name in told}


def rows_named(axes: Axes, names: Sequence[str], most: int = 40) -> None:
    """One row each, the first on top; no two names are the same."""
    told = distinct([plain(name, most) for name in names])
    axes.set_yticks(range(len(names)), told, fontsize=TICK)
    axes.set_ylim(len(names) - 0.45, -0.55)


def height_for(rows: int, each: float = 0.3, least: float = 2.6) -> float:
    return max(least, 1.6 + each * rows)


def log_axis(axes: Axes, which: str) -> None:
    """A logarithmic axis with few ticks, named as people write numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(numticks=7))
    low, high = sorted(getattr(axes, f"get_{which}lim")())
    decades = math.log10(high / low) if 0 < low < high else 0.0
    if decades < 0.9:
        axis.set_major_locator(MaxNLocator(5))
    elif decades < 1.8:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
    axis.set_major_formatter(FuncFormatter(lambda value, _: brief(value)))
    axis.set_minor_locator(NullLocator())


def _share_name(value: float, _place: object = None) -> str:
    return f"{brief(100 * value)} %" if value <= 1.0001 else ""


def share_axis(axes: Axes, which: str = "x") -> None:
    """Shares over decades, in percent."""
    from matplotlib.ticker import FuncFormatter

    log_axis(axes, which)
    axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter(FuncFormatter(_share_name))


def whole_numbers(axes: Axes, which: str = "x", most: int = 12) -> None:
    from matplotlib.ticker import MaxNLocator

    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10]))


def signed_log(axes: Axes, which: str, unit: float) -> None:
    """Straight around zero up to `unit`, by powers of ten beyond it, at most seven ticks."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    axis = getattr(axes, f"{which}axis")
    low, high = sorted(getattr(axes, f"get_{which}lim")())
    decades = math.log10(max(abs(low), abs(high), unit) / unit)
    if decades < 1:
        axis.set_major_locator(MaxNLocator(6))
        axis.set_major_formatter(FuncFormatter(lambda value, _: brief(value)))
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
    axis.set_major_formatter(FuncFormatter(lambda value, _: brief(value)))


def legend(
    made: Sheet, entries: Mapping[str, Artist], *, title: str = "", columns: int = 6
) -> None:
    """Below all panels, where it hides nothing."""
    if not entries:
        return
    longest = min(max(len(name) for name in entries), 44)
    room = int(made.figure.get_figwidth() * 11 / (longest + 7))
    rows = -(-len(entries) // max(1, min(columns, room)))
    made.figure.set_figheight(made.figure.get_figheight() + 0.2 * (rows - 1))
    drawn = made.figure.legend(
        list(entries.values()),
        [f" {plain(name, 44)}" for name in entries],
        loc="outside lower left",
        ncols=-(-len(entries) // rows),
        fontsize=TICK,
        frameon=False,
        title=title or None,
        title_fontsize=TICK,
        handletextpad=0.4,
    )
    drawn.set_alignment("left")


def color_bar(
    made: Sheet, image: AxesImage, axes: Axes | list[Axes], label: str, **more: object
) -> None:
    """Beside the panels, with ticks that are named as people write numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    bar = made.figure.colorbar(image, ax=axes, pad=0.01, aspect=30, **more)  # type: ignore[arg-type]
    low, high = image.get_clim()
    if type(image.norm).__name__ == "LogNorm" and low is not None and high is not None:
        decades = math.log10(high / low)
        narrow = MaxNLocator(5) if decades < 0.9 else LogLocator(subs=(1.0, 2.0, 5.0), numticks=9)
        bar.locator = LogLocator(numticks=7) if decades >= 1.8 else narrow
        bar.formatter = FuncFormatter(lambda value, _: brief(value))
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
    """Points with a thin light edge, so that those that touch are told apart."""
    told: dict[str, object] = {"s": 22, "edgecolors": WHITE, "linewidths": 0.4, **more}
    axes.scatter(x, y, color=color, marker=marker, **told)  # type: ignore[arg-type]


def bars(
    axes: Axes, values: Sequence[float], rows: Sequence[float], colors: object, height: float
) -> None:
    axes.barh(rows, values, height=height, color=colors)


def boxes_of(
    axes: Axes, values: Sequence[Sequence[float]], places: Sequence[float], colors: Sequence[str],
    *, width: float = 0.6, vertical: bool = False,
) -> None:  # fmt: skip
    """Boxes of quartiles with whiskers to the extremes: nothing is left out as an outlier."""
    told = []
    for found in values:
        cuts = np.quantile(np.asarray(found, dtype=np.float64), (0, 0.25, 0.5, 0.75, 1))
        told.append(dict(zip(("whislo", "q1", "med", "q3", "whishi"), cuts, strict=True)))
    drawn = axes.bxp(
        told, positions=places, orientation="vertical" if vertical else "horizontal", widths=width,
        showfliers=False, patch_artist=True, manage_ticks=False,
        medianprops={"color": BLACK, "linewidth": 1.3},
    )  # fmt: skip
    for box, color in zip(drawn["boxes"], colors, strict=True):
        box.set(facecolor=color, alpha=0.75)


def note(axes: Axes, text: str, *, x: float = 0.98, y: float = 0.96) -> None:
    """Words in a corner."""
    axes.text(
        x, y, text, transform=axes.transAxes, fontsize=SMALL, color=INK,
        ha="right" if x > 0.5 else "left", va="top" if y > 0.5 else "bottom",
    )  # fmt: skip
