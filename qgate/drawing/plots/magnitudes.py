"""Magnitudes by powers of two, with the ranges of formats above them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qgate.charts import shapes
from qgate.charts import sheet as charts
from qgate.charts.figure import dress
from qgate.charts.palette import BLACK, COCOA, COLORS, GRAY, INDIGO, ORANGE, WINE, format_color
from qgate.charts.sheet import Sheet, plain
from qgate.summaries.reading import (
    binades_of,
    by_kind,
    cast_names,
    figure_of,
    figures_of,
    grouped,
    is_gradient,
    kind_title,
    quant_type_of,
    value_tensors,
    worst,
)
from qgate.summaries.record import DumpAnalysis, Edges, GroupSummary, ValueSummary
from qgate.text import brief, counted, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_PANELS, _MOST_BORDERS = 12, 4
_OUTLIERS = 1.25
_DIRECTIONS = {"forward": COLORS[0], "backward": COLORS[1]}
_GRADIENTS = (INDIGO, WINE, COCOA, ORANGE, BLACK)

Groups = Sequence[GroupSummary]


# The axis of magnitudes --------------------------------------------------------------------------


def border_formats(analysis: DumpAnalysis) -> dict[str, Edges]:
    """Return formats without scales of their own, the narrowest first."""
    edges = {n: analysis["formats"][n] for n in cast_names(analysis) if n in analysis["formats"]}
    edges = {name: edge for name, edge in edges.items() if figure_of(edge, "max") > 0}

    def binades(name: str) -> float:
        return math.log2(edges[name]["max"]) - math.log2(max(edges[name]["min_subnormal"], 1e-320))

    return {name: edges[name] for name in sorted(edges, key=binades)[:_MOST_BORDERS]}


def _legend(
    page: Sheet, colors: Mapping[str, str], borders: Mapping[str, Edges], columns: int = 6
) -> None:
    """Write a legend of series and of the ranges of formats."""
    entries = shapes.keys(colors, linewidth=2)
    entries |= {f"{name} range": charts.patch(format_color(name)) for name in borders}
    if borders:
        entries["subnormal (pale)"] = charts.patch(GRAY, alpha=0.35)
        entries["saturates above"] = charts.line(GRAY, linestyle="-")
        entries["subnormal below"] = charts.line(GRAY, linestyle="--")
        entries["rounds to zero below"] = charts.line(GRAY, linestyle=":")
    charts.legend(page, entries, columns=columns)


def draw_magnitudes(
    axes: Axes, series: Mapping[str, Groups], colors: Mapping[str, str],
    borders: Mapping[str, Edges], *, within: Sequence[ValueSummary] | None = None, title: str = "",
    ticks: int = 8,
) -> None:  # fmt: skip
    """Draw the share of values in each binade by series, with air above the highest.

    The axis spans the items `within`, which are those of all series if they are not given.
    """
    top = 1e-3
    for name, items in series.items():
        if (binades := binades_of(items)) is not None:
            first, counts = binades
            shares = counts / counts.sum() * 100
            edges = np.arange(first, first + len(counts) + 1)
            shapes.steps(axes, shares, edges, colors[name], 0.18)
            top = max(top, float(shares.max()))
    axes.set_ylim(0, top * 1.08)
    axes.set_xlim(*_span(within or [g for items in series.values() for g in items]))
    _draw_borders(axes, borders)
    dress(axes, title=title, x="log2 of the magnitude", y="values (%)")
    charts.whole_numbers(axes, "x", ticks)


def _draw_borders(axes: Axes, borders: Mapping[str, Edges]) -> None:
    """Draw one bar per format above the values: solid where it is normal, pale where subnormal, and
    dotted lines down to the axis where it saturates and where it flushes to zero."""
    low, high = axes.get_xlim()
    top = axes.get_ylim()[1]
    strip = 0.085 * top
    for row, (name, edges) in enumerate(borders.items()):
        color = format_color(name)
        y = top + strip * (row + 0.3)
        ends = [
            min(max(math.log2(max(figure_of(edges, key), 1e-320)), low), high)
            for key in ("min_subnormal", "min_normal", "max")
        ]
        axes.broken_barh([(ends[0], ends[1] - ends[0])], (y, 0.6 * strip), color=color, alpha=0.35)
        axes.broken_barh([(ends[1], ends[2] - ends[1])], (y, 0.6 * strip), color=color)
        for end, style in zip(ends, (":", "--", "-"), strict=True):
            if low < end < high:
                axes.plot(
                    [end, end], [0, y], color=color, linewidth=0.9, linestyle=style, alpha=0.8
                )
    if borders:
        axes.set_ylim(0, top + strip * (len(borders) + 0.3))


def _span(items: Sequence[ValueSummary]) -> tuple[float, float]:
    """Return the ends of an axis of binades that leaves out the lowest 1e-6 of the values."""
    binades = binades_of(items)
    if binades is None:
        return 0.0, 1.0
    first, counts = binades
    low = first + int(np.searchsorted(np.cumsum(counts) / counts.sum(), 1e-6))
    return low - 1.0, first + len(counts) + 1.0


def _counted_groups(analysis: DumpAnalysis) -> list[GroupSummary]:
    return [group for group in analysis["groups"] if group.get("binades")]


def _by_type(groups: Groups, types: Sequence[str]) -> dict[str, list[GroupSummary]]:
    return {name: [group for group in groups if quant_type_of(group) == name] for name in types}


# Pictures ----------------------------------------------------------------------------------------


def magnitudes(analysis: DumpAnalysis) -> Sheet | None:
    groups = _counted_groups(analysis)
    kinds = by_kind(groups)

    def spread(kind: tuple[str, str, str]) -> float:
        binades = binades_of(kinds[kind])
        return math.nan if binades is None else float(len(binades[1]))

    widest = worst(kinds, spread, _MOST_PANELS)
    if not widest:
        return None
    title = f"{kind_title(widest[0][0])} spans {counted(int(widest[0][1]), 'binade')}"
    if len(kinds) > 1:
        title += f", the most of {len(kinds)} kinds"
    names = list(kinds)
    if len(names) > _MOST_PANELS:
        names = [kind for kind, _ in widest]
        title += f"; the {_MOST_PANELS} widest of {len(kinds)}"
    page, panels = shapes.tiles(title, len(names), (3.9, 2.5), extra=1.3)
    types = list(grouped(groups, quant_type_of))[: len(COLORS)]
    colors, borders = charts.type_colors(types), border_formats(analysis)
    for axes, kind in zip(panels, names, strict=True):
        mine = kinds[kind]
        draw_magnitudes(
            axes, _by_type(mine, types), colors, borders, within=mine,
            title=plain(kind_title(kind, 44), 46),
        )  # fmt: skip
        zeros = sum(max(figure_of(group, "zeros"), 0) for group in mine if "zeros" in group)
        total = sum(figure_of(group, "counted") for group in mine)
        if total > 0 and zeros / total >= 0.0005:
            text = f"zeros {percent(zeros / total)}"
            charts.note(axes, text, x=0.02, y=0.78 if borders else 0.96)
    _legend(page, colors, borders)
    return page


def quant_types(analysis: DumpAnalysis) -> Sheet | None:
    groups = _counted_groups(analysis)
    types = list(grouped(groups, quant_type_of))
    if len(types) < 2:
        return None
    tensors = grouped(value_tensors(analysis), quant_type_of)
    tops = {n: max((figure_of(t, "amax") for t in tensors.get(n, ())), default=math.nan)
            for n in types}  # fmt: skip
    far = worst(types, lambda name: tops[name])
    near = min((top for top in tops.values() if math.isfinite(top)), default=math.nan)
    title = f"{len(types)} quant types side by side"
    if far and far[0][1] <= 1.05 * near:
        title += f": all reach up to {brief(far[0][1])}"
    elif far and math.isfinite(near):
        title += f": largest magnitudes from {brief(near)} to {brief(far[0][1])} ({far[0][0]})"
    types = types[: len(COLORS)]
    colors, borders = charts.type_colors(types), border_formats(analysis)
    operations = dict(list(grouped(groups, lambda group: group["operation"]).items())[:4])
    page, panels = shapes.tiles(title, len(operations), (5.2, 4.2), columns=4, extra=0, least=6.5)
    for axes, (operation, mine) in zip(panels, operations.items(), strict=True):
        draw_magnitudes(
            axes, _by_type(mine, types), colors, borders, within=mine, title=plain(operation)
        )
    _legend(page, colors, borders)
    return page


def _directions(groups: Groups) -> dict[str, list[GroupSummary]]:
    series = {
        "forward": [g for g in groups if g["operation"] == "forward" and g.get("binades")],
        "backward": [g for g in groups if is_gradient(g) and g.get("binades")],
    }
    return series if all(series.values()) else {}


def _gap(series: Mapping[str, Groups]) -> str:
    """Say how much smaller the gradients are, if their root mean squares are known."""
    sizes = []
    for groups in series.values():
        rms, weights = figures_of(groups, "rms"), figures_of(groups, "counted")
        if not rms.size or rms.size != weights.size or not weights.sum() > 0:
            return ""
        sizes.append(math.sqrt(float((rms**2 * weights).sum() / weights.sum())))
    if not all(size > 0 for size in sizes):
        return ""
    binades = math.log2(sizes[0] / sizes[1])
    side = "below" if binades >= 0 else "above"
    return f": {abs(binades):.0f} binades {side} by root mean square"


def forward_backward(analysis: DumpAnalysis) -> Sheet | None:
    series = _directions(analysis["groups"])
    if not series:
        return None
    page, axes = shapes.single(f"Gradients against forward tensors{_gap(series)}", 9.5, 4.4)
    borders = border_formats(analysis)
    draw_magnitudes(axes, series, _DIRECTIONS, borders, ticks=14)
    names = {"forward": _DIRECTIONS["forward"], "gradients": _DIRECTIONS["backward"]}
    _legend(page, names, borders, columns=5)
    return page


def gradients(analysis: DumpAnalysis) -> Sheet | None:
    types = grouped(analysis["groups"], lambda group: group["layer_type"])
    by_type = {name: series for name, g in types.items() if (series := _directions(g))}
    by_type = dict(list(by_type.items())[:6])
    only = [group for group in _counted_groups(analysis) if is_gradient(group)]
    names = dict(list(grouped(only, lambda group: group["name"]).items())[:5])
    if not names or len(by_type) + len(names) < 2:
        return None
    low = min(names, key=lambda name: _span(names[name])[0])
    lowest = f"2^{_span(names[low])[0] + 1:.0f}"
    title = f"{low} reaches lowest of {counted(len(names), 'kind')} of gradients: {lowest}"
    page, panels = shapes.tiles(title, len(by_type) + 1, (4.6, 3.1))
    borders = border_formats(analysis)
    for axes, (layer_type, series) in zip(panels, by_type.items(), strict=False):
        words = f"{plain(layer_type, 24)}: forward and gradients"
        draw_magnitudes(axes, series, _DIRECTIONS, borders, title=words)
    colors = dict(zip(names, _GRADIENTS, strict=False))
    draw_magnitudes(panels[-1], names, colors, borders, within=only, title="gradients by name")
    _legend(page, {**(_DIRECTIONS if by_type else {}), **colors}, borders, columns=5)
    return page


def layer_types(analysis: DumpAnalysis) -> Sheet | None:
    """Draw types of layers by magnitudes, rms, largest value, and the ratio of these two."""
    tensors, groups = value_tensors(analysis), _counted_groups(analysis)
    types = grouped(tensors, lambda tensor: tensor["layer_type"])
    forward = [tensor for tensor in tensors if tensor["operation"] == "forward"]
    if len(ahead := grouped(forward, lambda tensor: tensor["layer_type"])) >= 2:
        types, groups = ahead, [group for group in groups if group["operation"] == "forward"]
    if len(types) < 2:
        return None
    types = dict(list(types.items())[: len(COLORS)])
    rms = {n: [(t, v) for t in mine if (v := figure_of(t, "rms")) > 0] for n, mine in types.items()}
    crest = {n: [figure_of(t, "amax") / v for t, v in mine] for n, mine in rms.items() if mine}
    title = f"{len(types)} types of layers side by side"
    if crest:
        medians = {name: float(np.median(ratios)) for name, ratios in crest.items()}
        far, least = max(medians, key=lambda name: medians[name]), min(medians.values())
        title = f"{far} has the farther outliers: largest value {brief(medians[far])} times the rms"
        if medians[far] < _OUTLIERS * least:
            title = f"Outliers are alike in {len(medians)} types of layers: largest value "
            title += f"{brief(least)} to {brief(medians[far])} times the rms"
    amax = {n: [v for t in m if (v := figure_of(t, "amax")) > 0] for n, m in types.items()}
    columns: dict[str, dict[str, list[float]]] = {
        "root mean square": {name: [v for _, v in mine] for name, mine in rms.items()},
        "largest magnitude": amax,
        "largest magnitude over rms": crest,
    }
    columns = {label: values for label, values in columns.items() if any(values.values())}
    page = charts.sheet(12, 4.0, title)
    count = len(columns) + bool(groups)
    panels = charts.panels(page, count, count)
    colors = charts.colors_for(types)
    if groups:
        series = {n: [group for group in groups if group["layer_type"] == n] for n in types}
        draw_magnitudes(panels.pop(0), series, colors, {}, within=groups, ticks=6)
    for axes, (label, values) in zip(panels, columns.items(), strict=True):
        present = {name: numbers for name, numbers in values.items() if numbers}
        shapes.standing_boxes(axes, present, colors, label)
        charts.log_axis(axes, "y")
        if len(present) > 3:
            axes.tick_params(axis="x", rotation=30)
    charts.legend(page, shapes.keys(colors, linewidth=4))
    return page
