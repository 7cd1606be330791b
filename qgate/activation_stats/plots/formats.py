"""Losses of number formats by layer, gains of smoothing, sensitivity of layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from qgate.activation_stats.plots._sheet import key, mark, panel_sheet
from qgate.activation_stats.reading import (
    GAIN_DB,
    Layers,
    Loss,
    common_start,
    format_names,
    kind_name,
    kinds,
    loss_of,
    losses,
    name_of,
    numbers,
    of_role,
    short_kinds,
    smoothed_by_format,
    target_value,
    worst_format,
)
from qgate.activation_stats.record import (
    EXACT_DB,
    ActivationsRecord,
    LayerActivations,
    Smoothed,
)
from qgate.activation_stats.settings import ViewSettings
from qgate.charts.figure import SMALL, dress
from qgate.charts.palette import COLORS, GRAY, ON_PALE, PALE, WARN, WHITE
from qgate.charts.shapes import cell_map
from qgate.charts.sheet import (
    MARKERS,
    Sheet,
    color_bar,
    colors_for,
    columns_for,
    dots,
    height_for,
    line,
    name_rows,
    patch,
    plain,
    sheet,
    whole_numbers,
)
from qgate.summaries.reading import figure_of, worst
from qgate.text import counted, decibels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cells = list[list[Loss | None]]
Advice = tuple[LayerActivations, Smoothed]
_MOST_KINDS, _MOST_ROWS, _MOST_LAYERS, _MOST_DB = 24, 14, 40, 120.0
_BLUE, _ORANGE = COLORS[0], COLORS[1]


def draw_losses(record: ActivationsRecord, role: str, view: ViewSettings) -> Sheet | None:
    """Draw kinds of modules by layers, one map per format, all on one scale."""
    layers = [layer for layer in of_role(record, role) if losses(layer)]
    names = [n for n in format_names(record) if any(n in losses(layer) for layer in layers)]
    if not names:
        return None
    by_kind = kinds(layers)
    kinds_drawn = dict(list(by_kind.items())[:_MOST_KINDS])
    columns = _columns(list(kinds_drawn.values()))
    maps = {name: _map(list(kinds_drawn.values()), name, columns) for name in names}
    values = {
        name: np.array([[math.nan if x is None else x.worse for x in row] for row in cells])
        for name, cells in maps.items()
    }
    finite = np.concatenate([table[np.isfinite(table)] for table in values.values()])
    bad, (name, loss) = min(
        ((layer, worst) for layer in layers if (worst := worst_format(layer))),
        key=lambda pair: pair[1][1].worse,
    )
    title = f"{name} has the lowest SQNR, of the {role} of {name_of(bad, 60)}: {loss}"
    wide = columns_for(len(names)) if len(columns) <= 16 else min(2, len(names))
    height = max(1.1, 0.3 * len(kinds_drawn) + 0.75)
    page, all_axes = panel_sheet(
        len(names), title, widths=(13.0,) * 3, base=1.2, row_height=height, columns=wide
    )
    low = 5.0 * math.floor(float(finite.min(initial=1e9)) / 5.0) if finite.size else 0.0
    high = max(float(finite.max(initial=30.0)), low + 10.0)
    for panel, (axes, format_name) in enumerate(zip(all_axes, names, strict=True)):
        cells = values[format_name]
        shown_values = np.where(
            np.isfinite(cells), cells, np.where(np.isposinf(cells), high, np.nan)
        )
        image = cell_map(axes, shown_values, vmin=low, vmax=high)
        if len(columns) * wide <= 30:
            _write(axes, maps[format_name], low + 0.6 * (high - low))
        dress(axes, title=plain(format_name, 40), x="layer" if len(columns) > 1 else "", grid="")
        short = [plain(kind, 28) for kind in short_kinds(kinds_drawn).values()]
        rows = short if panel % wide == 0 else [""] * len(short)
        axes.set_yticks(range(len(rows)), rows, fontsize=SMALL)
        at = range(0, len(columns), max(1, -(-len(columns) // 10)))
        axes.set_xticks(list(at), [str(columns[k]) if len(columns) > 1 else "" for k in at])
        axes.spines[["left", "bottom"]].set_visible(False)
    color_bar(page, image, all_axes, "SQNR (dB), the worse: dark is lost")
    if any(x is not None and x.differs for cells in maps.values() for row in cells for x in row):
        key(page, {"40/9: with/without massive elements": patch("none")}, view.show_legend)
    if len(by_kind) > len(kinds_drawn):
        more = len(by_kind) - len(kinds_drawn)
        all_axes[-1].set_xlabel(f"{more} more kinds of modules in the tables")
    return page


def _columns(rows: list[Layers]) -> list[int]:
    """Return the numbers of layers, or their positions where two share a number."""
    several = [numbers(layers) for layers in rows if len(layers) > 1]
    if all(layer_numbers is not None for layer_numbers in several):
        return sorted({n for layer_numbers in several for n in layer_numbers or []}) or [0]
    return list(range(max(map(len, rows))))


def _map(rows: list[Layers], name: str, columns: list[int]) -> Cells:
    cells: Cells = [[None] * len(columns) for _ in rows]
    at = {number: index for index, number in enumerate(columns)}
    for row, layers in zip(cells, rows, strict=True):
        own = numbers(layers) if len(layers) > 1 else [columns[0]]
        for index, layer in enumerate(layers):
            column = at.get(own[index], index) if own is not None else index
            if len(layers) == 1 and layer["layer"] in at:
                column = at[layer["layer"]]
            row[column] = losses(layer).get(name)
    return cells


def _write(axes: Axes, cells: Cells, dark: float) -> None:
    """Write whole decibels, two figures where they differ."""
    for y, row in enumerate(cells):
        for x, loss in enumerate(row):
            if loss is not None:
                figures = (loss.sqnr_db, loss.rest_db) if loss.differs else (loss.sqnr_db,)
                words = dict.fromkeys("exact" if db == math.inf else f"{db:.0f}" for db in figures)
                color = WHITE if loss.worse < dark else ON_PALE
                axes.text(
                    x, y, "/".join(words), ha="center", va="center", fontsize=SMALL, color=color
                )


# Smoothing ---------------------------------------------------------------------------------------


def _gain(pair: Advice, *fields: str) -> float:
    return max(figure_of(pair[1], field) for field in fields) - pair[1]["before_db"]


def draw_alphas(record: ActivationsRecord, view: ViewSettings) -> Sheet | None:
    """Draw SQNR by migration strength, a line per layer, the best of each marked."""
    by_format = smoothed_by_format(record)
    by_format = {k: v for k, v in by_format.items() if any(one["curve"] for _, one in v)}
    if not by_format:
        return None
    pairs = [pair for advice in by_format.values() for pair in advice]
    best = max(pairs, key=lambda pair: _gain(pair, "after_db"))
    gain = _gain(best, "after_db")
    title = f"Smoothing gains at most {gain:.1f} dB"
    if gain >= GAIN_DB:
        title = f"Smoothing gains most in {best[1]['format']}: {gain:+.1f} dB for "
        title += f"{name_of(best[0], 56)} at α {best[1]['alpha']:g}"
    modules = list(dict.fromkeys(kind_name(layer["module"]) for layer, _ in pairs))
    colors = colors_for(modules)
    page, all_axes = panel_sheet(len(by_format), title, base=1.6, row_height=3.0)
    for axes, (format_name, advice) in zip(all_axes, by_format.items(), strict=True):
        for layer, one in advice:
            points = sorted((float(alpha), value) for alpha, value in one["curve"].items())
            color = colors[kind_name(layer["module"])]
            axes.plot(*zip(*points, strict=True), "-", color=color, linewidth=0.9, alpha=0.7)
            top = one["curve"].get(f"{one['alpha']:g}", one["after_db"])
            axes.plot([one["alpha"]], [top], "o", color=color, markersize=4,
                      markeredgecolor=WHITE, markeredgewidth=0.3)  # fmt: skip
        axes.margins(y=0.08)
        x, y = "migration strength α", "SQNR of the output (dB)"
        dress(axes, title=plain(format_name, 40), x=x, y=y)
    short = short_kinds(modules)
    entries = {short[kind]: line(colors[kind]) for kind in modules[: len(COLORS)]}
    return key(page, {**entries, "best α": mark("o", GRAY)}, view.show_legend)


def draw_smoothing(record: ActivationsRecord, view: ViewSettings) -> Sheet | None:
    """Draw the layers that gain most from smoothing or rotation: before, smoothed, rotated."""
    by_format = smoothed_by_format(record)
    if not by_format:
        return None
    gaining = {
        name: [pair for pair, _ in worst(advice, _most_gain, _MOST_ROWS)]
        for name, advice in by_format.items()
    }
    pairs = [pair for advice in by_format.values() for pair in advice]
    layer, one = max(pairs, key=lambda pair: _gain(pair, "after_db"))
    title = f"{name_of(layer, 50)} in {one['format']}: {one['before_db']:.1f} dB as it is, "
    title += f"{one['after_db']:.1f} dB smoothed"
    rotated = sum(figure_of(advised, "hadamard_db") > advised["after_db"] for _, advised in pairs)
    if rotated:
        title += f"; a Hadamard rotation gains more in {rotated} of {len(pairs)} cases"
    most = max(map(len, gaining.values()))
    page, all_axes = panel_sheet(
        len(gaining), title, widths=(9.0, 13.0, 15.0), row_height=0.9 + 0.42 * most,
        columns=min(3, len(gaining)),
    )  # fmt: skip
    series = (("as it is", "before_db", GRAY), ("smoothed", "after_db", _BLUE),
              ("Hadamard rotation", "hadamard_db", _ORANGE))  # fmt: skip
    start = common_start([layer["module"] for layer, _ in pairs])
    for axes, (format_name, advice) in zip(all_axes, gaining.items(), strict=True):
        for index, (_, name, color) in enumerate(series):
            values = [(row, figure_of(one, name)) for row, (_, one) in enumerate(advice)]
            points = [(row, value) for row, value in values if not math.isnan(value)]
            if points:
                rows = [row + 0.26 * (index - 1) for row, _ in points]
                axes.barh(rows, [value for _, value in points], height=0.24, color=color)
        modules = [layer["module"] for layer, _ in advice]
        name_rows(axes, [module[len(start) :] or module for module in modules], 30)
        dress(axes, title=plain(format_name, 40), x="predicted SQNR of the output (dB)", grid="x")
    return key(page, {name: patch(color) for name, _, color in series}, view.show_legend)


def _most_gain(pair: Advice) -> float:
    return _gain(pair, "after_db", *(["hadamard_db"] if "hadamard_db" in pair[1] else []))


# Sensitivity -------------------------------------------------------------------------------------


def draw_sensitivity(
    record: ActivationsRecord, format_name: str, view: ViewSettings
) -> Sheet | None:
    """Draw layers quantized alone, the most harmful first, and the cut of a proposal."""
    layers = [e for e in record["sensitivity"] if e["format"] == format_name and "sqnr_db" in e]
    if not layers:
        return None
    layers.sort(key=lambda entry: (entry["sqnr_db"], entry["module"]))
    title = f"{format_name} hurts most in {name_of(layers[0], 56)}: "
    title += f"{decibels(layers[0]['sqnr_db'])} of the output"
    keep: set[str] = set()
    proposals = [p for p in record["proposals"] if p["format"] == format_name]
    for best in proposals[:1]:
        keep, target = set(best["keep"]), best["target"]
        many = counted(len(best["keep"]), "layer")
        if not best["reached"]:
            title += f"; {target} is not reached, not even with {many} kept"
        elif keep:
            title += f"; {many} of {len(layers)} kept reach {target}"
        else:
            title += f"; all {len(layers)} quantized reach {target}"
    first = layers[:_MOST_LAYERS]
    page = sheet(10, height_for(len(first), 0.25, 3.0), title)
    axes = page.figure.subplots()
    for row, entry in enumerate(first):
        whole, own = min(entry["sqnr_db"], _MOST_DB), loss_of(entry, "local_sqnr_db")
        if own is not None:
            local = min(own.worse, _MOST_DB)
            axes.plot([local, whole], [row, row], color=PALE, linewidth=1, zorder=1)
            dots(axes, [local], [row], GRAY, MARKERS[3], s=16)
        dots(axes, [whole], [row], _ORANGE if entry["module"] in keep else _BLUE, "o", s=34)
    cut = max((row for row, entry in enumerate(first) if entry["module"] in keep), default=-1)
    if 0 <= cut < len(layers) - 1:
        axes.axhline(cut + 0.5, color=WARN, linewidth=1.1, linestyle="--")
    start = common_start([entry["module"] for entry in layers])
    name_rows(axes, [entry["module"][len(start) :] or entry["module"] for entry in first], 44)
    more = len(layers) - len(first)
    about = f"only this layer in {format_name}"
    about += f" ({more} less sensitive ones in the tables)" if more else ""
    dress(axes, title=plain(about, 100), x="SQNR (dB)", grid="x")
    entries = {"of the model's output": mark("o", _BLUE)}
    if any("local_sqnr_db" in entry for entry in first):
        entries["of the layer, or without massive elements"] = mark(MARKERS[3], GRAY)
    if keep:
        entries["kept in higher precision"] = mark("o", _ORANGE)
        if 0 <= cut < len(layers) - 1:
            entries["cut of the proposal"] = line(WARN, linestyle="--")
    return key(page, entries, view.show_legend)


def draw_proposal(record: ActivationsRecord, format_name: str, view: ViewSettings) -> Sheet | None:
    """Draw the gain of the model with every layer that is kept."""
    own = [p for p in record["proposals"] if p["format"] == format_name and len(p["curve"]) > 1]
    if not own:
        return None
    first = own[0]
    title = f"{format_name}: {counted(len(first['keep']), 'layer')} kept give "
    title += f"{target_value(first, first['value'])}, none kept "
    title += f"{target_value(first, first['all_quantized'])} ({first['target']})"
    page, all_axes = panel_sheet(len(own), title, base=1.4, row_height=2.9, columns=1)
    for axes, proposal in zip(all_axes, own, strict=True):
        # With all layers kept there is no error: that point would flatten all others.
        points = [point for point in proposal["curve"] if point[1] < EXACT_DB] or proposal["curve"]
        axes.plot(*zip(*points, strict=True), "o-", color=_BLUE, markersize=5)
        if proposal["value"] < EXACT_DB:
            count = len(proposal["keep"])
            axes.plot([count], [proposal["value"]], "o", color=_ORANGE, markersize=9)
        unit = "SQNR of the output (dB)" if "dB" in proposal["target"] else "loss"
        dress(
            axes, title=plain(proposal["target"], 60), x="layers kept in higher precision", y=unit
        )
        whole_numbers(axes)
    entries = {"measured": line(_BLUE, "o"), "proposed": mark("o", _ORANGE)}
    return key(page, entries, view.show_legend)
