"""Draw the pictures of a sweep: metrics over the scale exponent, or over the block offset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
from qgate.charts.figure import LABEL, PANEL, TICK
from qgate.charts.palette import BLACK, BLUE, DARK_GREEN, GRAY, ORANGE, RED, SKY, WHITE
from qgate.charts.sheet import Drawing, Sheet, line, patch, plain, sheet
from qgate.metrics import METRICS
from qgate.sweeps.record import (
    USUAL,
    SweepRecord,
    SweepView,
    energy,
    exponent_text,
    factor_text,
    metric,
    number,
    share,
    short,
)
from qgate.text import brief, counted, decibels, shortened

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.gridspec import SubplotSpec

# The two ratios share a panel.
_RATIOS = {"sqnr_db": BLUE, "psnr_db": SKY}
_FIRST = ("mse", "cosine", "psnr_db")
_LOST = "lost"
_ENDS = {"exact": "exact alignment", "documented": "documented alignment"}
Box = tuple[str, list[str]]


@dataclass(frozen=True)
class SweptPicture:
    """A picture of one kind of sweep: its file stem, a description, and the function to draw it."""

    kind: str
    stem: str
    about: str
    draw: Drawing[SweepRecord]


def _build(record: SweepRecord, panels: Sequence[str], height: float) -> Sheet:
    """Draw panels in rows of three, with a legend above and boxes of figures below."""
    view, rows = SweepView(record), len(panels) // 3
    picture = sheet(14, height, _finding(view), color=RED if record["failed"] else BLACK)
    heights = [0.04 * rows + 0.02, *[1.0] * rows, 0.18 * rows + 0.12]
    cells = picture.figure.add_gridspec(rows + 2, 3, height_ratios=heights)
    for column, (title, body) in enumerate(
        (_tensor_box(view), _format_box(view), _advice_box(view))
    ):
        axes = _bare(picture, cells[rows + 1, column])
        color = DARK_GREEN if column == 2 else BLACK
        axes.text(0, 1, plain(title, 90), va="top", fontsize=PANEL, weight="bold", color=color)
        text = "\n".join(plain(words, 120) for words in body)
        axes.text(0, 0.83, text, va="top", fontsize=LABEL, linespacing=1.35)
    grid = _grid(view)
    variable = "offset to the block exponent" if view.is_block else "scale exponent"
    variable = "log2 of the factor of scales" if view.usual_kind == "own" else variable
    for index, panel in enumerate(panels):
        axes = picture.figure.add_subplot(cells[1 + index // 3, index % 3])
        if panel in _RATIOS:
            _draw_ratios(axes, view, grid)
        elif panel == _LOST:
            _draw_shares(axes, view, grid)
        else:
            _draw_metric(axes, view, grid, panel)
        axes.set_xlabel(f"saturates \u2190   {variable}   \u2192 flushes", fontsize=LABEL)
        if view.is_block:
            axes.xaxis.set_major_formatter(lambda value, _: view.exponent(value))
    _draw_legend(_bare(picture, cells[0, :]), view, grid)
    return picture


def _bare(picture: Sheet, cell: SubplotSpec) -> Axes:
    axes = picture.figure.add_subplot(cell)
    axes.axis("off")
    return axes


def _finding(view: SweepView) -> str:
    """Write the accuracy of the recommended level, or the reason why the tensor fails."""
    best, gap = view.best, view.gap_db
    subject = f"{shortened(view.tensor['name'], 60)} in {view.format_title}"
    if view.record["failed"]:
        return f"FAILS: {shortened(view.record['failed'], 60)}; {subject}"
    level = f"{'block offset' if view.is_block else 'scale'} {view.power(best)}"
    ratio = metric(best, "sqnr_db")
    worth = "is exact" if ratio == math.inf else f"keeps SQNR {decibels(ratio, 2)}"
    past = ""
    if view.usual_kind in best["marks"]:
        past = f", as {USUAL[view.usual_kind]} does"
    elif math.isfinite(gap) and abs(gap) >= 0.005:
        past = f", {gap:+.2f} dB against {USUAL[view.usual_kind]}"
    cost = f" ({view.mse_cost})" if view.mse_cost else ""
    return f"{subject}: {level} {worth}{past}{cost}"


def _grid(view: SweepView) -> PanelGrid:
    levels = view.levels
    ends = [] if view.is_block else [view.marked(mark) for mark in ("maximum", "minimum")]
    return PanelGrid(
        x=np.array([number(level["exponent"]) for level in levels]),
        integer=np.array([bool(level["integer"]) for level in levels]),
        overflow=np.array([level["severity"]["overflow"] == "high" for level in levels]),
        costly=np.array([number(level["overflow_energy"]) > 0.01 for level in levels]),
        recommended=view.advice["recommended"],
        usual=number(view.usual["exponent"]) if view.usual else None,
        ends=tuple(number(level["exponent"]) for level in ends if level),
    )


def _values(view: SweepView, name: str) -> Floats:
    return np.array([metric(level, name) for level in view.levels])


def _draw_metric(axes: Axes, view: SweepView, grid: PanelGrid, name: str) -> None:
    definition, value = METRICS.get(name), metric(view.best, name)
    kind: Kind = "cosine" if definition.bounded else "error"
    draw_curves(axes, grid, [Curve(_values(view, name))], kind)
    unit = f" ({definition.unit})" if definition.unit else ""
    axes.set_ylabel(f"{definition.label}{unit}", fontsize=LABEL)
    if not math.isnan(value):
        text = "0 (exact)" if value == 0 else brief(value)
        text = definition.text(value) if definition.bounded else text
        title = f"{text} at the recommended {'offset' if view.is_block else 'scale'}"
        axes.set_title(title, loc="left", fontsize=PANEL, color=DARK_GREEN, y=1.0)


def _draw_ratios(axes: Axes, view: SweepView, grid: PanelGrid) -> None:
    curves = [Curve(_values(view, name), color) for name, color in _RATIOS.items()]
    draw_curves(axes, grid, curves[::-1], "decibel")
    labels = {name: METRICS.get(name).label for name in _RATIOS}
    axes.set_ylabel(f"{', '.join(labels.values())} (dB)", fontsize=LABEL)
    texts = {name: f"{labels[name]} {decibels(metric(view.best, name), 2)}" for name in _RATIOS}
    _above(axes, [line(_RATIOS[name], "o", markersize=5, label=texts[name]) for name in _RATIOS])


def _above(axes: Axes, handles: Sequence[Artist]) -> None:
    """Put a legend in the place of the title, where no curve runs."""
    axes.legend(
        handles=list(handles),
        loc="lower left",
        bbox_to_anchor=(-0.02, 0.99),
        ncols=2,
        frameon=False,
        fontsize=TICK,
        borderpad=0.2,
        handlelength=1.4,
        columnspacing=1.0,
        handletextpad=0.4,
    )


def _draw_shares(axes: Axes, view: SweepView, grid: PanelGrid) -> None:
    """Draw elements and energy lost at both ends, in percent, on an axis that has a zero."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    draw_ground(axes, grid)
    axes.set_yscale("symlog", linthresh=1e-3, linscale=0.6)
    lines = []
    for kind, lost, color in (("overflow", "saturated", RED), ("flush", "flushed", BLUE)):
        for unit, words, style, size, fill in (
            ("share", "elements", "-", 0.85, color),
            ("energy", "energy", "--", 0.6, WHITE),
        ):
            lines += axes.plot(
                grid.x,
                np.array([number(level[f"{kind}_{unit}"]) * 100 for level in view.levels]),
                color=color,
                linestyle=style,
                linewidth=1.4,
                marker="o",
                markersize=marker_size(grid) * size,
                markerfacecolor=fill,
                label=f"{lost} {words}",
            )
    axes.set_ylim(-2.5e-4, 220)
    axes.yaxis.set_major_locator(FixedLocator([0, 1e-3, 1e-2, 0.1, 1, 10, 100]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("lost (%)", fontsize=LABEL)
    _above(axes, lines)


def _draw_legend(axes: Axes, view: SweepView, grid: PanelGrid) -> None:
    """Draw one legend for all panels, without entries that the picture does not use."""
    label = f"recommended {view.at(view.best)}"
    star = {"markersize": 13, "linewidth": 5, "markeredgecolor": WHITE}
    handles = [line(DARK_GREEN, "*", label=label, **star)]
    if grid.usual is not None:
        label = f"{USUAL[view.usual_kind]} {view.exponent(grid.usual)}"
        handles.append(line(ORANGE, linestyle="--", label=label))
    if grid.ends:
        kind = "ends" if view.parameters["alignment"].endswith("given") else "alignment ends"
        ends = ", ".join(dict.fromkeys(view.exponent(end) for end in grid.ends))
        handles.append(line(GRAY, linestyle=":", label=f"{kind} {ends}"))
    if grid.overflow.any():
        handles.append(patch(RED, alpha=0.17, label=">1% of elements saturate"))
    if (grid.costly & ~grid.overflow).any():
        handles.append(patch(RED, alpha=0.08, label=">1% of energy saturates"))
    if not grid.integer.all():
        kinds = [("integer", BLUE, 6)] if grid.integer.any() else []
        for label, fill, size in (*kinds, ("fractional: not an E8M0 scale", WHITE, 4)):
            dot = line("C0", "o", linestyle="none", markeredgecolor=BLUE, markersize=size)
            dot.set(markerfacecolor=fill, label=label)
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


# Boxes of figures ------------------------------------------------------------------------------


def _tensor_box(view: SweepView) -> Box:
    tensor = view.tensor
    least, most = number(tensor["amin"]), number(tensor["amax"])
    binades = f" ({math.log2(most / least):.1f} binades)" if 0 < least <= most < math.inf else ""
    rounded = f", rounded to {tensor['rounded_to']}" if tensor["rounded_to"] else ""
    digest = str(tensor["sha256"] or "-")
    return "Tensor", [
        f"{shortened(list(tensor['shape']), 30)} {tensor['dtype']}{rounded}, "
        f"{tensor['elements']} elements",
        f"range [{short(tensor['min'])}, {short(tensor['max'])}]",
        f"magnitudes {short(least)} to {short(most)}{binades}",
        f"mean {short(tensor['mean'])}, std {short(tensor['std'])}, zeros {tensor['zeros']}, "
        f"NaN {tensor['nan']}, Inf {int(tensor['posinf']) + int(tensor['neginf'])}",
        f"SHA-256 {digest[:16]}{'...' if len(digest) > 16 else ''}",
    ]


def _format_box(view: SweepView) -> Box:
    fmt, parameters = view.format, view.parameters
    most, normal, least = (number(fmt[key]) for key in ("max", "min_normal", "min_subnormal"))
    least = least if 0 < least <= normal else normal
    body = [
        f"{fmt['bits']} bits, largest value {short(most)} (exponent {fmt['max_exponent']})",
        f"smallest normal {short(normal)}, smallest value {short(least)}",
        f"{math.log2(most / least):.1f} binades, rounding {fmt['rounding']}",
    ]
    if view.is_block:
        blocks = f"blocks of {parameters['block']} along axis {parameters['axis']}"
        return f"Format {view.format_title}", [*body, f"{blocks}, {parameters['scale_rule']} rule"]
    ends = f"{exponent_text(parameters['min_exp'])} to {exponent_text(parameters['max_exp'])}"
    alignment = _ENDS.get(parameters["alignment"], "as given")
    levels = f"{counted(len(view.levels), 'level')}, exponents {ends} ({alignment})"
    width = f"scale of {parameters['scale_bits']} bits"
    return f"Format {view.format_title}", [*body, levels, width]


def _advice_box(view: SweepView) -> Box:
    best, gap, cosine = view.best, view.gap_db, metric(view.best, "cosine")
    unfit = f", {view.unfit}" if view.unfit else ""
    used = f"{USUAL[view.usual_kind]} {view.exponent(view.usual_exponent)}"
    if view.usual_kind in best["marks"]:
        used += ": the same"
    elif abs(gap) < 0.005:
        used += ": equal in SQNR"
    elif math.isfinite(gap):
        used += f": recommended is {gap:+.2f} dB SQNR"
    elif view.usual is None:
        used += ", not among the levels"
    offset = f"offset {view.at(best)}, factor " if view.is_block else ""
    return f"Recommended: {offset}{factor_text(best)}{unfit}", [
        f"SQNR {decibels(metric(best, 'sqnr_db'), 2)}, MSE {brief(metric(best, 'mse'))}, "
        f"cosine {'undefined' if math.isnan(cosine) else f'{cosine:.6f}'}",
        *(
            f"{words}: {best[kind]} ({share(best, kind)}), {energy(best, kind)} of the energy"
            for kind, words in (("overflow", "saturated"), ("flush", "flushed to zero"))
        ),
        used,
    ]


draw_metrics, draw_summary, draw_block = (
    Drawing(partial(_build, panels=panels, height=height))
    for panels, height in (
        ((*_FIRST, "mae", "max_abs", "relative_error"), 8.8),
        (_FIRST, 6.0),
        (("psnr_db", "mse", _LOST), 6.0),
    )
)

PICTURES: tuple[SweptPicture, ...] = (
    SweptPicture("tensor", "scaling_test", "Six metrics over the scales.", draw_metrics),
    SweptPicture("tensor", "scaling_summary", "MSE, cosine and SQNR, larger.", draw_summary),
    SweptPicture("block", "block_scaling", "Offsets to the block exponents.", draw_block),
)
