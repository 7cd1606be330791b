"""The pictures of a sweep: metrics against the scale exponent, or against the block offset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qgate.report.plots._boxes import advice_box, format_box, tensor_box
from qgate.report.plots._curves import (
    GREEN,
    ORANGE,
    Curve,
    Floats,
    Grid,
    Kind,
    brief,
    draw_curves,
    draw_ground,
    marker_size,
)
from qgate.report.plots._figure import BLUE, GRAY, RED, new_figure, save
from qgate.report.sweeps._record import (
    Record,
    decibel_text,
    exponent_text,
    format_title,
    marked,
    metric,
    number,
    offset_text,
    recommended,
    shortened,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec, SubplotSpec

_PSNR = "#67a9cf"
_Panel = tuple[str, str, Kind]
_MSE: _Panel = ("mse", "MSE", "error")
_COSINE: _Panel = ("cosine", "Cosine similarity", "cosine")
_RATIO: _Panel = ("psnr_db", "SNR (dB)", "decibel")
_MAE: _Panel = ("mae", "MAE", "error")
_LARGEST: _Panel = ("max_abs", "Max absolute error", "error")
_RELATIVE: _Panel = ("relative_error", "Relative error (%)", "error")


def draw_metrics(path: Path, record: Record) -> None:
    """Six metrics over all levels, with what they mean for this tensor and format."""
    panels = (_MSE, _COSINE, _RATIO, _MAE, _LARGEST, _RELATIVE)
    _draw_tensor(path, record, panels, rows=2, height=8.6)


def draw_summary(path: Path, record: Record) -> None:
    """The three metrics people look at first, larger."""
    _draw_tensor(path, record, (_MSE, _COSINE, _RATIO), rows=1, height=6.4)


def draw_block(path: Path, record: Record) -> None:
    """An offset to every block's own exponent: what it gains and what it loses."""
    figure, grid_spec = _sheet(record, rows=1, height=6.4)
    if record["levels"]:
        grid = _grid(record)
        panels = [figure.add_subplot(grid_spec[1, column]) for column in range(3)]
        _draw_ratios(panels[0], record, grid)
        _draw_metric(panels[1], record, grid, _MSE)
        _draw_shares(panels[2], record, grid)
        for axes in panels:
            axes.set_xlabel("saturates \u2190   offset to the block exponent   \u2192 flushes")
            axes.xaxis.set_major_formatter(lambda value, _: offset_text(value))
        _draw_legend(_bare(figure, grid_spec[0, :]), record, grid)
    save(figure, path)


def _draw_tensor(
    path: Path, record: Record, panels: Sequence[_Panel], *, rows: int, height: float
) -> None:
    figure, grid_spec = _sheet(record, rows=rows, height=height)
    if record["levels"]:
        grid = _grid(record)
        for index, panel in enumerate(panels):
            axes = figure.add_subplot(grid_spec[1 + index // 3, index % 3])
            if panel is _RATIO:
                _draw_ratios(axes, record, grid)
            else:
                _draw_metric(axes, record, grid, panel)
            if index // 3 == rows - 1:
                axes.set_xlabel("saturates \u2190   scale exponent   \u2192 flushes")
        _draw_legend(_bare(figure, grid_spec[0, :]), record, grid)
    save(figure, path)


def _grid(record: Record) -> Grid:
    levels = record["levels"]
    block = record["kind"] == "block"
    ends = [marked(record, mark) for mark in ("maximum", "minimum")]
    production = marked(record, "production")
    return Grid(
        x=np.array([number(level["exponent"]) for level in levels]),
        integer=np.array([bool(level["integer"]) for level in levels]),
        overflow=np.array([level["severity"]["overflow"] == "high" for level in levels]),
        costly=np.array([number(level["overflow_energy"]) > 0.01 for level in levels]),
        recommended=record["advice"].get("recommended"),
        production=number(production["exponent"]) if production else None,
        ends=() if block else tuple(number(level["exponent"]) for level in ends if level),
    )


def _values(record: Record, name: str) -> Floats:
    return np.array([metric(level, name) for level in record["levels"]])


def _draw_metric(axes: Axes, record: Record, grid: Grid, panel: _Panel) -> None:
    name, title, kind = panel
    draw_curves(axes, grid, [Curve(_values(record, name))], kind)
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold")
    best = recommended(record)
    if best is not None and not math.isnan(metric(best, name)):
        value = metric(best, name)
        said = f"{value:.6f}" if name == "cosine" else "0 (exact)" if value == 0 else brief(value)
        axes.set_title(said, loc="right", fontsize=10.5, color=GREEN)


def _draw_ratios(axes: Axes, record: Record, grid: Grid) -> None:
    from matplotlib.lines import Line2D

    curves = {"SQNR": ("sqnr_db", BLUE), "PSNR": ("psnr_db", _PSNR)}
    shown = [Curve(_values(record, name), color) for name, color in curves.values()]
    draw_curves(axes, grid, shown[::-1], "decibel")
    axes.set_title(_RATIO[1], loc="left", fontsize=11.5, fontweight="bold")
    best = recommended(record)
    handles = [
        Line2D(
            [],
            [],
            color=color,
            marker="o",
            markersize=5,
            label=f"{label} {decibel_text(metric(best, name))}" if best else label,
        )
        for label, (name, color) in curves.items()
    ]
    _above(axes, handles)


def _above(axes: Axes, handles: Sequence[Artist], columns: int = 2) -> None:
    """A legend beside the title, where no curve runs."""
    axes.legend(
        handles=list(handles),
        loc="lower right",
        bbox_to_anchor=(1.02, 0.985),
        ncols=columns,
        frameon=False,
        fontsize=9,
        borderpad=0.2,
        handlelength=1.4,
        columnspacing=1.0,
        handletextpad=0.4,
    )


def _draw_shares(axes: Axes, record: Record, grid: Grid) -> None:
    """Elements and energy lost at both ends, in percent; zero has a place on this axis."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    draw_ground(axes, grid)
    axes.set_yscale("symlog", linthresh=1e-3, linscale=0.6)
    lines = []
    for kind, color in (("overflow", RED), ("flush", BLUE)):
        for what, style in (("share", "-"), ("energy", "--")):
            y = np.array([number(level[f"{kind}_{what}"]) * 100 for level in record["levels"]])
            words = "elements" if what == "share" else "energy"
            lines += axes.plot(
                grid.x,
                y,
                color=color,
                linestyle=style,
                linewidth=1.4,
                marker="o",
                markersize=marker_size(grid) * (0.85 if what == "share" else 0.6),
                markerfacecolor=color if what == "share" else "white",
                label=f"{'saturated' if kind == 'overflow' else 'flushed'} {words}",
            )
    axes.set_ylim(-2.5e-4, 220)
    axes.yaxis.set_major_locator(FixedLocator([0, 1e-3, 1e-2, 0.1, 1, 10, 100]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_title("Lost (%)", loc="left", fontsize=11.5, fontweight="bold")
    _above(axes, lines)


def _sheet(record: Record, *, rows: int, height: float) -> tuple[Figure, GridSpec]:
    """A figure with its headline and, below the panels, the figures of tensor and format."""
    figure = new_figure(14, height)
    figure.set_layout_engine("constrained", w_pad=0.09, h_pad=0.07, hspace=0.03, wspace=0.02)
    heights = [0.04 * rows + 0.02, *[1.0] * rows, 0.18 * rows + 0.12]
    grid_spec = figure.add_gridspec(rows + 2, 3, height_ratios=heights)
    parts = [shortened(record["tensor"]["name"], 60), format_title(record)]
    if record.get("failed"):
        parts.insert(0, f"FAILS: {shortened(record['failed'], 60)}")
    else:
        parts.append(shortened(record["advice"]["speaks_about"], 60))
    color = RED if record.get("failed") else "black"
    figure.suptitle(_drawable("   |   ".join(parts)), fontsize=13, color=color, parse_math=False)
    boxes = (tensor_box(record), format_box(record), advice_box(record))
    for column, (title, body) in enumerate(boxes):
        axes = _bare(figure, grid_spec[rows + 1, column])
        color = GREEN if column == 2 and recommended(record) else "black"
        axes.text(0, 1, title, va="top", fontsize=10.5, fontweight="bold", color=color)
        text = _drawable("\n".join(body))
        axes.text(0, 0.83, text, va="top", fontsize=9.5, linespacing=1.35, parse_math=False)
    if not record["levels"]:
        figure.text(0.5, 0.55, "no level could be measured", ha="center", fontsize=14, color=GRAY)
    return figure, grid_spec


def _bare(figure: Figure, place: SubplotSpec) -> Axes:
    axes = figure.add_subplot(place)
    axes.axis("off")
    return axes


def _drawable(text: str) -> str:
    """Text as the picture's font can draw it, with a mark for each sign it lacks."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    return "".join(char if char == "\n" or font.get_char_index(ord(char)) else "?" for char in text)


def _draw_legend(axes: Axes, record: Record, grid: Grid) -> None:
    """One legend for all panels, and only what is in the picture."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    name = offset_text if record["kind"] == "block" else exponent_text
    handles: list[Artist] = []
    if grid.recommended is not None:
        best = Line2D([], [], color=GREEN, marker="*", markersize=13, linewidth=5)
        best.set(markeredgecolor="white", label=f"recommended {name(grid.x[grid.recommended])}")
        handles.append(best)
    if grid.production is not None:
        label = f"production {name(grid.production)}"
        handles.append(Line2D([], [], color=ORANGE, linestyle="--", label=label))
    if grid.ends:
        kind = "ends" if record["parameters"]["alignment"].endswith("given") else "alignment ends"
        label = f"{kind} {', '.join(dict.fromkeys(name(end) for end in grid.ends))}"
        handles.append(Line2D([], [], color=GRAY, linestyle=":", label=label))
    if grid.overflow.any():
        handles.append(Patch(color=RED, alpha=0.17, label=">1% of elements saturate"))
    if (grid.costly & ~grid.overflow).any():
        handles.append(Patch(color=RED, alpha=0.08, label=">1% of energy saturates"))
    if not grid.integer.all():
        kinds = [("integer", BLUE)] if grid.integer.any() else []
        for label, fill in (*kinds, ("fractional: not an E8M0 scale", "white")):
            dot = Line2D([], [], linestyle="none", marker="o", markeredgecolor=BLUE)
            dot.set(markerfacecolor=fill, markersize=4 if fill == "white" else 6, label=label)
            handles.append(dot)
    legend = axes.legend(
        handles=handles,
        loc="center",
        ncols=len(handles),
        frameon=False,
        fontsize=9.2,
        borderpad=0,
        columnspacing=1.4,
        handletextpad=0.5,
    )
    legend.set_in_layout(False)
