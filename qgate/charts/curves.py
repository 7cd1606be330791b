"""A metric over the scale exponent, whatever its values: exact, infinite, constant, undefined.

An exact level has no position on a logarithmic or decibel axis. It is drawn and named at the better
edge of the panel, so that the best levels never drop out of the picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from qgate.charts.figure import TICK, dress
from qgate.charts.palette import BLACK, BLUE, DARK_GREEN, GRAY, ORANGE, RED, WHITE
from qgate.text import brief

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Kind = Literal["error", "decibel", "cosine"]

_SAME_COSINE = 1e-12
_EDGE, _LABEL = 0.085, 0.015


@dataclass(frozen=True)
class PanelGrid:
    """The levels of all panels of a sheet, and their properties."""

    x: Floats
    integer: Mask
    overflow: Mask
    costly: Mask
    recommended: int | None
    usual: float | None
    ends: tuple[float, ...]

    @property
    def limits(self) -> tuple[float, float]:
        low, high = float(self.x.min()), float(self.x.max())
        pad = max(0.04 * (high - low), 0.5) if high - low >= 1 else 1.0
        return low - pad, high + pad

    @property
    def edges(self) -> Floats:
        """The borders between the cells of neighboring levels, outermost limits included."""
        order = np.sort(self.x)
        low, high = self.limits
        return np.concatenate([[low], (order[:-1] + order[1:]) / 2, [high]])


@dataclass(frozen=True)
class Curve:
    """One metric over the levels, on the kind of axis it needs."""

    values: Floats
    color: str = BLUE

    def plotted(self, kind: Kind) -> Floats:
        """Return the values for the axis: a cosine by its distance to 1."""
        if kind != "cosine":
            return self.values
        distance = 1 - self.values
        return np.where(np.abs(distance) < _SAME_COSINE, 0.0, distance)


def draw_curves(axes: Axes, grid: PanelGrid, curves: Sequence[Curve], kind: Kind) -> None:
    """Draw everything inside one panel but its title."""
    draw_ground(axes, grid)
    pairs = [(curve, curve.plotted(kind)) for curve in curves]
    if all(np.isnan(values).all() for _, values in pairs):
        text = "not defined for this tensor"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=GRAY)
        axes.set_yticks([])
        return
    exact, lost = (0.0, math.inf) if kind != "decibel" else (math.inf, -math.inf)
    rooms = [any((values == edge).any() for _, values in pairs) for edge in (exact, lost)]
    inside = np.concatenate([values[_drawable(values, kind)] for _, values in pairs])
    _set_limits(axes, inside, kind, *rooms)
    for curve, values in pairs:
        _draw_line(axes, grid, curve, np.where(_drawable(values, kind), values, np.nan))
    top = kind != "error"
    best = "cosine 1" if kind == "cosine" else "exact"
    for level, at_top, words in ((exact, top, best), (lost, not top, "infinite")):
        _draw_at_edge(axes, grid, [(c, v == level) for c, v in pairs], at_top, words)


def _drawable(values: Floats, kind: Kind) -> Mask:
    finite = np.isfinite(values)
    return finite if kind == "decibel" else finite & (values > 0)


def draw_ground(axes: Axes, grid: PanelGrid) -> None:
    """Draw the parts that all panels share: the shading, the marked exponents, the grid."""
    from matplotlib.ticker import MaxNLocator

    dress(axes)
    _shade(axes, grid, grid.overflow, 0.13)
    _shade(axes, grid, grid.costly & ~grid.overflow, 0.06)
    for end in grid.ends:
        axes.axvline(end, color=GRAY, linewidth=1.2, linestyle=":")
    if grid.recommended is not None:
        at = float(grid.x[grid.recommended])
        axes.axvline(at, color=DARK_GREEN, linewidth=7, alpha=0.22, solid_capstyle="butt")
    low, high = grid.limits
    if grid.usual is not None and low <= grid.usual <= high:
        axes.axvline(grid.usual, color=ORANGE, linewidth=1.4, linestyle="--")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, steps=[1, 2, 5, 10]))


def _shade(axes: Axes, grid: PanelGrid, mask: Mask, alpha: float) -> None:
    """Shade neighbors in one piece, so that no seams show."""
    edges = grid.edges
    start: float | None = None
    for cell, inside in enumerate([*mask[np.argsort(grid.x)], False]):
        if inside and start is None:
            start = float(edges[cell])
        if not inside and start is not None:
            axes.axvspan(start, float(edges[cell]), color=RED, alpha=alpha, linewidth=0)
            start = None


def marker_size(grid: PanelGrid) -> float:
    return 5.5 if len(grid.x) <= 30 else 4.2


def _draw_line(axes: Axes, grid: PanelGrid, curve: Curve, y: Floats) -> None:
    size = marker_size(grid)
    order = np.argsort(grid.x)
    axes.plot(grid.x[order], y[order], color=curve.color, linewidth=1.2, alpha=0.75)
    everywhere = np.ones(len(grid.x), dtype=bool)
    _draw_levels(axes, grid, everywhere, y, curve.color, "o", (0.62 * size, size), edge=0.8)
    if grid.recommended is not None:
        _draw_star(axes, float(grid.x[grid.recommended]), float(y[grid.recommended]))


def _draw_levels(
    axes: Axes, grid: PanelGrid, mask: Mask, y: Floats, color: str, marker: str,
    sizes: tuple[float, float], *, edge: float | None = None, **more: Any,
) -> None:  # fmt: skip
    """Draw markers at levels, filled and larger where the exponent is whole."""
    for pick, filled in ((mask & ~grid.integer, False), (mask & grid.integer, True)):
        axes.plot(
            grid.x[pick], y[pick], linestyle="none", marker=marker, markersize=sizes[filled],
            markeredgecolor=color, markerfacecolor=color if filled else WHITE,
            markeredgewidth=edge, **more,
        )  # fmt: skip


def _draw_star(axes: Axes, x: float, y: float, *, at_edge: bool = False) -> None:
    axes.plot(
        [x], [y], marker="*", markersize=14, color=DARK_GREEN, markeredgecolor=WHITE,
        markeredgewidth=0.7, linestyle="none", zorder=5,
        transform=axes.get_xaxis_transform() if at_edge else axes.transData,
    )  # fmt: skip


def _draw_at_edge(
    axes: Axes, grid: PanelGrid, curves: Sequence[tuple[Curve, Mask]], at_top: bool, words: str
) -> None:
    """Draw levels beyond the axis in a row along its edge, named once."""
    y = 1 - _EDGE if at_top else _EDGE
    across = axes.get_xaxis_transform()
    at_edge = np.zeros(len(grid.x), dtype=bool)
    for curve, mask in curves:
        at_edge |= mask
        shape, at = ("^" if at_top else "v"), np.full(len(grid.x), y)
        _draw_levels(axes, grid, mask, at, curve.color, shape, (4.5, 6.5), transform=across)
    if not at_edge.any():
        return
    if grid.recommended is not None and at_edge[grid.recommended]:
        _draw_star(axes, float(grid.x[grid.recommended]), y, at_edge=True)
    low, high = grid.limits
    middle = (float(grid.x[at_edge].min()) + float(grid.x[at_edge].max())) / 2
    middle = min(max(middle, low + 0.09 * (high - low)), high - 0.09 * (high - low))
    axes.text(
        middle, 1 - _LABEL if at_top else _LABEL, words, transform=across, ha="center",
        va="top" if at_top else "bottom", fontsize=TICK, color=BLACK,
    )  # fmt: skip


def _set_limits(axes: Axes, inside: Floats, kind: Kind, exact: bool, lost: bool) -> None:
    """Leave some air around the data, and a strip for levels that are drawn at an edge."""
    if kind == "decibel":
        low, high = _padded(inside, 1.0, below=lost, above=exact)
        axes.set_ylim(low, high)
        if not inside.size:
            axes.set_yticks([])
        return
    if not inside.size:
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        return
    axes.set_yscale("log")
    low, high = _padded(np.log10(inside), 0.6, below=exact, above=lost)
    if kind == "cosine":
        high = min(high, math.log10(2.2)) if not lost else high
    _name_ticks(axes, kind, high - low)
    if kind == "cosine":
        low, high = high, low
    axes.set_ylim(10 ** max(min(low, 300.0), -300.0), 10 ** max(min(high, 300.0), -300.0))


def _padded(values: Floats, least: float, *, below: bool, above: bool) -> tuple[float, float]:
    if not values.size:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    missing = max(least - (high - low), 0.0) / 2
    low, high = low - missing, high + missing
    span = high - low
    return low - span * (0.27 if below else 0.07), high + span * (0.27 if above else 0.09)


def _name_ticks(axes: Axes, kind: Kind, decades: float) -> None:
    """Name a few ticks, also between powers of ten where there are few of those.

    A cosine is drawn by its distance to 1 and named by its value: 0.9, 0.99, 0.999.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    def name(value: float, _: object = None) -> str:
        power = math.floor(math.log10(value) + 1e-9)
        if kind == "cosine":
            return f"1 - {brief(value)}" if power < -5 else f"{1 - value:.{max(0, -power)}f}"
        return brief(value)

    between = [1.0] if decades >= 2.4 else [1.0, 2.0, 5.0]
    between += [3.0, 7.0] if decades < 0.9 else []
    axes.yaxis.set_major_locator(LogLocator(subs=sorted(between), numticks=9))
    axes.yaxis.set_major_formatter(FuncFormatter(name))
    axes.yaxis.set_minor_locator(NullLocator())
