"""The pictures of a sweep: metrics against the scale exponent, or against the block offset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qgate.charts.curves import (
    Curve,
    Floats,
    Kind,
    PanelGrid,
    draw_curves,
    draw_ground,
    marker_size,
)
from qgate.charts.figure import HEADLINE, LABEL, PANEL, TICK
from qgate.charts.palette import BLACK, BLUE, DARK_GREEN, GRAY, ORANGE, RED, SKY, WHITE
from qgate.charts.sheet import Drawing, Sheet, plain, sheet
from qgate.metrics import METRICS
from qgate.sweeps._plot_boxes import advice_box, format_box, tensor_box
from qgate.sweeps.record import (
    USUAL,
    Record,
    decibel_text,
    exponent_text,
    format_title,
    marked,
    metric,
    mse_cost,
    number,
    offset_text,
    recommended,
    usual_gap,
    usual_kind,
    usual_level,
)
from qgate.text import brief, shortened

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.gridspec import GridSpec, SubplotSpec

# The two ratios share a panel.
_RATIOS = {"sqnr_db": BLUE, "psnr_db": SKY}
_FIRST = ("mse", "cosine", "psnr_db")


@dataclass(frozen=True)
class SweptPicture:
    """For which kind of sweep, its file without format and ending, and what draws it."""

    kind: str
    stem: str
    about: str
    draw: Drawing[Record]


def _build_metrics(record: Record) -> Sheet:
    """Six metrics over all levels, with what they mean for this tensor and format."""
    panels = (*_FIRST, "mae", "max_abs", "relative_error")
    return _tensor(record, panels, rows=2, height=8.8)


def _build_summary(record: Record) -> Sheet:
    """The three metrics people look at first, larger."""
    return _tensor(record, _FIRST, rows=1, height=6.0)


def _build_block(record: Record) -> Sheet:
    """An offset to every block's own exponent: what it gains and what it loses."""
    made, grid_spec = _sheet(record, rows=1, height=6.0)
    if record["levels"]:
        grid = _grid(record)
        panels = [made.figure.add_subplot(grid_spec[1, column]) for column in range(3)]
        _draw_ratios(panels[0], record, grid)
        _draw_metric(panels[1], record, grid, "mse")
        _draw_shares(panels[2], record, grid)
        for axes in panels:
            _label(axes, "offset to the block exponent")
            axes.xaxis.set_major_formatter(lambda value, _: offset_text(value))
        _draw_legend(_bare(made, grid_spec[0, :]), record, grid)
    return made


def _tensor(record: Record, panels: Sequence[str], *, rows: int, height: float) -> Sheet:
    made, grid_spec = _sheet(record, rows=rows, height=height)
    if record["levels"]:
        grid = _grid(record)
        for index, panel in enumerate(panels):
            axes = made.figure.add_subplot(grid_spec[1 + index // 3, index % 3])
            if panel in _RATIOS:
                _draw_ratios(axes, record, grid)
            else:
                _draw_metric(axes, record, grid, panel)
            _label(axes, "scale exponent")
        _draw_legend(_bare(made, grid_spec[0, :]), record, grid)
    return made


def _label(axes: Axes, text: str) -> None:
    axes.set_xlabel(f"saturates \u2190   {text}   \u2192 flushes", fontsize=LABEL)


def _grid(record: Record) -> PanelGrid:
    levels = record["levels"]
    block = record["kind"] == "block"
    ends = [marked(record, mark) for mark in ("maximum", "minimum")]
    usual = usual_level(record)
    return PanelGrid(
        x=np.array([number(level["exponent"]) for level in levels]),
        integer=np.array([bool(level["integer"]) for level in levels]),
        overflow=np.array([level["severity"]["overflow"] == "high" for level in levels]),
        costly=np.array([number(level["overflow_energy"]) > 0.01 for level in levels]),
        recommended=record["advice"].get("recommended"),
        usual=number(usual["exponent"]) if usual else None,
        ends=() if block else tuple(number(level["exponent"]) for level in ends if level),
    )


def _values(record: Record, name: str) -> Floats:
    return np.array([metric(level, name) for level in record["levels"]])


def _draw_metric(axes: Axes, record: Record, grid: PanelGrid, name: str) -> None:
    known = METRICS.get(name)
    kind: Kind = "cosine" if known.bounded else "error"
    unit = f" ({known.unit})" if known.unit else ""
    draw_curves(axes, grid, [Curve(_values(record, name))], kind)
    axes.set_ylabel(f"{known.label}{unit}", fontsize=LABEL)
    best = recommended(record)
    if best is not None and not math.isnan(metric(best, name)):
        value = metric(best, name)
        said = known.text(value) if known.bounded else "0 (exact)" if value == 0 else brief(value)
        what = "offset" if record["kind"] == "block" else "scale"
        title = f"{said} at the recommended {what}"
        axes.set_title(title, loc="left", fontsize=PANEL, color=DARK_GREEN, y=1.0)


def _draw_ratios(axes: Axes, record: Record, grid: PanelGrid) -> None:
    from matplotlib.lines import Line2D

    shown = [Curve(_values(record, name), color) for name, color in _RATIOS.items()]
    draw_curves(axes, grid, shown[::-1], "decibel")
    labels = {name: METRICS.get(name).label for name in _RATIOS}
    axes.set_ylabel(f"{', '.join(labels.values())} (dB)", fontsize=LABEL)
    best = recommended(record)
    handles = [
        Line2D(
            [],
            [],
            color=color,
            marker="o",
            markersize=5,
            label=f"{labels[name]} {decibel_text(metric(best, name))}" if best else labels[name],
        )
        for name, color in _RATIOS.items()
    ]
    _above(axes, handles)


def _above(axes: Axes, handles: Sequence[Artist], columns: int = 2) -> None:
    """A legend in the place of the title, where no curve runs."""
    axes.legend(
        handles=list(handles),
        loc="lower left",
        bbox_to_anchor=(-0.02, 0.99),
        ncols=columns,
        frameon=False,
        fontsize=TICK,
        borderpad=0.2,
        handlelength=1.4,
        columnspacing=1.0,
        handletextpad=0.4,
    )


def _draw_shares(axes: Axes, record: Record, grid: PanelGrid) -> None:
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
                markerfacecolor=color if what == "share" else WHITE,
                label=f"{'saturated' if kind == 'overflow' else 'flushed'} {words}",
            )
    axes.set_ylim(-2.5e-4, 220)
    axes.yaxis.set_major_locator(FixedLocator([0, 1e-3, 1e-2, 0.1, 1, 10, 100]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("lost (%)", fontsize=LABEL)
    _above(axes, lines)


def _finding(record: Record) -> str:
    """The recommended level and what it is worth; what the tensor fails for comes first."""
    name, best = shortened(record["tensor"]["name"], 60), recommended(record)
    where = f"{name} in {format_title(record)}"
    if record.get("failed"):
        return f"FAILS: {shortened(record['failed'], 60)}; {where}"
    if best is None:
        return f"{where}: no level could be measured"
    block = record["kind"] == "block"
    level = (offset_text if block else exponent_text)(best["exponent"])
    level = f"block offset {level}" if block else f"scale 2^{level}"
    ratio = metric(best, "sqnr_db")
    worth = "is exact" if ratio == math.inf else f"keeps SQNR {decibel_text(ratio)}"
    gap, kind = usual_gap(record), usual_kind(record)
    past = ""
    if kind in best["marks"]:
        past = f", as {USUAL[kind]} does"
    elif math.isfinite(gap) and abs(gap) >= 0.005:
        past = f", {gap:+.2f} dB against {USUAL[kind]}"
    past += f" ({cost})" if (cost := mse_cost(record)) else ""
    return f"{where}: {level} {worth}{past}"


def _sheet(record: Record, *, rows: int, height: float) -> tuple[Sheet, GridSpec]:
    """A figure with its finding and, below the panels, the figures of tensor and format."""
    made = sheet(14, height, _finding(record), color=RED if record.get("failed") else BLACK)
    heights = [0.04 * rows + 0.02, *[1.0] * rows, 0.18 * rows + 0.12]
    grid_spec = made.figure.add_gridspec(rows + 2, 3, height_ratios=heights)
    boxes = (tensor_box(record), format_box(record), advice_box(record))
    for column, (title, body) in enumerate(boxes):
        axes = _bare(made, grid_spec[rows + 1, column])
        color = DARK_GREEN if column == 2 and recommended(record) else BLACK
        axes.text(0, 1, plain(title, 90), va="top", fontsize=PANEL, weight="bold", color=color)
        text = "\n".join(plain(line, 120) for line in body)
        axes.text(0, 0.83, text, va="top", fontsize=LABEL, linespacing=1.35)
    if not record["levels"]:
        told = "no level could be measured"
        made.figure.text(0.5, 0.55, told, ha="center", fontsize=HEADLINE, color=GRAY)
    return made, grid_spec


def _bare(made: Sheet, place: SubplotSpec) -> Axes:
    axes = made.figure.add_subplot(place)
    axes.axis("off")
    return axes


def _draw_legend(axes: Axes, record: Record, grid: PanelGrid) -> None:
    """One legend for all panels, and only what is in the picture."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    name = offset_text if record["kind"] == "block" else exponent_text
    handles: list[Artist] = []
    if grid.recommended is not None:
        best = Line2D([], [], color=DARK_GREEN, marker="*", markersize=13, linewidth=5)
        best.set(markeredgecolor=WHITE, label=f"recommended {name(grid.x[grid.recommended])}")
        handles.append(best)
    if grid.usual is not None:
        label = f"{USUAL[usual_kind(record)]} {name(grid.usual)}"
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
        for label, fill in (*kinds, ("fractional: not an E8M0 scale", WHITE)):
            dot = Line2D([], [], linestyle="none", marker="o", markeredgecolor=BLUE)
            dot.set(markerfacecolor=fill, markersize=4 if fill == WHITE else 6, label=label)
            handles.append(dot)
    legend = axes.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(-0.01, 0.5),
        ncols=len(handles),
        frameon=False,
        fontsize=LABEL,
        borderpad=0,
        columnspacing=1.4,
        handletextpad=0.5,
    )
    legend.set_in_layout(False)


draw_metrics = Drawing(_build_metrics)
draw_summary = Drawing(_build_summary)
draw_block = Drawing(_build_block)

PICTURES: tuple[SweptPicture, ...] = (
    SweptPicture("tensor", "scaling_test", "Six metrics over the scales.", draw_metrics),
    SweptPicture("tensor", "scaling_summary", "MSE, cosine and SQNR, larger.", draw_summary),
    SweptPicture("block", "block_scaling", "Offsets to the block exponents.", draw_block),
)
