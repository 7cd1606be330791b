"""How the values of each kind of tensor are spread, and where the formats end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qgate.charts.figure import dress
from qgate.charts.palette import BLACK, COLORS, GRAY, format_color
from qgate.charts.sheet import (
    MOST_ROWS,
    Drawing,
    Sheet,
    height_for,
    legend,
    line,
    log_axis,
    note,
    panels,
    patch,
    plain,
    rows_named,
    sheet,
    signed_log,
    type_colors,
    whole_numbers,
)
from qgate.summaries.reading import (
    Floats,
    binades_of,
    by_kind,
    figure_of,
    format_names,
    kind_of,
    kind_title,
    quant_type_of,
    worst,
)
from qgate.summaries.record import DumpAnalysis, Edges, GroupPortrait, Portrait
from qgate.text import brief, counted, percent

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_MOST_PANELS, _MOST_BORDERS, _MOST_QQ = 12, 4, 9


def border_formats(analysis: DumpAnalysis) -> dict[str, Edges]:
    """Formats without scales of their own, the ones that lose most first; these have borders."""
    names = [name for name in format_names(analysis) if name in analysis["formats"]]
    plain_ones = [name for name in names if not analysis["formats"][name].get("scaled")]
    usable = [n for n in plain_ones if figure_of(analysis["formats"][n], "max") > 0]

    def binades(name: str) -> float:
        edges = analysis["formats"][name]
        return math.log2(edges["max"]) - math.log2(max(edges["min_subnormal"], 1e-320))

    chosen = sorted(usable, key=binades)[:_MOST_BORDERS]
    return {name: analysis["formats"][name] for name in chosen}


def draw_binades(axes: Axes, items: Iterable[Portrait], color: str, *, fill: bool = False) -> float:
    """The share of the values in each binade; the largest share, 0 where there is none."""
    found = binades_of(items)
    if found is None:
        return 0.0
    first, counts = found
    share = counts / counts.sum() * 100
    edges = np.arange(first, first + len(counts) + 1)
    axes.stairs(share, edges, color=color, linewidth=1.5, fill=False)
    if fill:
        axes.stairs(share, edges, color=color, alpha=0.18, fill=True, linewidth=0)
    return float(share.max())


def stacked_binades(
    axes: Axes, series: dict[str, list[GroupPortrait]], colors: dict[str, str]
) -> None:
    """Several on one axis, with air above the highest."""
    tops = [draw_binades(axes, items, colors[name], fill=True) for name, items in series.items()]
    axes.set_ylim(0, max([*tops, 1e-3]) * 1.08)


def draw_borders(axes: Axes, borders: dict[str, Edges]) -> None:
    """One bar per format above the values: solid where it is normal, pale where subnormal, and
    dotted lines down to the axis where it saturates and where it flushes to zero."""
    if not borders:
        return
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
    axes.set_ylim(0, top + strip * (len(borders) + 0.3))


def border_entries(borders: dict[str, Edges]) -> dict[str, Artist]:
    entries: dict[str, Artist] = {f"{name} range": patch(format_color(name)) for name in borders}
    if borders:
        entries["subnormal (pale)"] = patch(GRAY, alpha=0.35)
        entries["saturates above"] = line(GRAY, linestyle="-")
        entries["subnormal below"] = line(GRAY, linestyle="--")
        entries["rounds to zero below"] = line(GRAY, linestyle=":")
    return entries


def span_of(items: Sequence[Portrait]) -> tuple[float, float]:
    """From where to where an axis of binades goes, the outermost 1e-6 of the values left out."""
    found = binades_of(items)
    if found is None:
        return 0.0, 1.0
    first, counts = found
    below = np.cumsum(counts) / counts.sum()
    low = first + int(np.searchsorted(below, 1e-6))
    return low - 1.0, first + len(counts) + 1.0


def _spread(items: Sequence[Portrait]) -> float:
    found = binades_of(items)
    return math.nan if found is None else float(len(found[1]))


def _build_magnitudes(analysis: DumpAnalysis) -> Sheet | None:
    groups = [group for group in analysis["groups"] if group.get("binades")]
    kinds = by_kind(groups)
    if not kinds:
        return None
    widest, spread = worst(kinds, lambda kind: _spread(kinds[kind]))[0]
    title = f"{kind_title(widest)} spans {counted(int(spread), 'binade')}"
    if len(kinds) > 1:
        title += f", the most of {len(kinds)} kinds"
    chosen = list(kinds)
    if len(chosen) > _MOST_PANELS:
        chosen = [k for k, _ in worst(kinds, lambda kind: _spread(kinds[kind]), _MOST_PANELS)]
        title += f"; the {_MOST_PANELS} widest of {len(kinds)}"
    columns = min(3, len(chosen))
    rows = -(-len(chosen) // columns)
    made = sheet(max(3.9 * columns, 6.4), 2.5 * rows + 1.3, title)
    types = list(dict.fromkeys(quant_type_of(group) for group in groups))[: len(COLORS)]
    colors, borders = type_colors(types), border_formats(analysis)
    for axes, kind in zip(panels(made, len(chosen), columns), chosen, strict=True):
        mine = kinds[kind]
        stacked_binades(
            axes, {n: [g for g in mine if quant_type_of(g) == n] for n in types}, colors
        )
        axes.set_xlim(*span_of(mine))
        draw_borders(axes, borders)
        dress(
            axes, title=plain(kind_title(kind, 44), 46), x="log2 of the magnitude", y="values (%)"
        )
        whole_numbers(axes, "x", 8)
        zeros = sum(max(figure_of(g, "zeros"), 0) for g in mine if "zeros" in g)
        total = sum(figure_of(g, "counted") for g in mine)
        if total > 0 and zeros / total >= 0.0005:
            note(axes, f"zeros {percent(zeros / total)}", x=0.02, y=0.78 if borders else 0.96)
    entries: dict[str, Artist] = {name: line(colors[name], linewidth=2) for name in types}
    legend(made, {**entries, **border_entries(borders)})
    return made


def _build_boxes(analysis: DumpAnalysis) -> Sheet | None:
    groups = [
        group
        for group in analysis["groups"]
        if figure_of(group, "std") > 0
        and {"0.25", "0.5", "0.75"} <= set(group.get("quantiles", ()))
    ]
    if not groups:
        return None
    groups.sort(key=lambda g: (kind_of(g), quant_type_of(g)))
    total = len(groups)
    reach = {id(group): _reach(group) for group in groups}
    far, sigmas = worst(groups, lambda group: reach[id(group)])[0]
    if total > MOST_ROWS:
        groups = [g for g, _ in worst(groups, lambda g: reach[id(g)], MOST_ROWS)]
    title = (
        f"{kind_title(kind_of(far))} reaches {brief(sigmas)} standard deviations from its mean, "
        "the farthest"
    )
    if total > len(groups):
        title += f"; the {len(groups)} farthest of {total}"
    made = sheet(10.5, height_for(len(groups), 0.28), title)
    left, right = made.figure.subplots(1, 2, sharey=True, width_ratios=(2.6, 1))
    types = list(dict.fromkeys(quant_type_of(group) for group in groups))
    colors = type_colors(types)
    told = [_box(group) for group in groups]
    drawn = left.bxp(
        told, positions=range(len(groups)), orientation="horizontal", widths=0.6,
        showfliers=False, patch_artist=True, manage_ticks=False,
        medianprops={"color": BLACK, "linewidth": 1.2},
    )  # fmt: skip
    for box, group in zip(drawn["boxes"], groups, strict=True):
        box.set(facecolor=colors[quant_type_of(group)], alpha=0.75)
    rows = np.arange(len(groups))
    for end in ("low", "high"):
        left.plot([box[end] for box in told], rows, "|", color=BLACK, markersize=7)
    left.margins(x=0.03)
    signed_log(left, "x", 1.0)
    dress(
        left,
        title="box: quartiles; whiskers: 1 % and 99 %; ticks: extremes",
        x="distance from the mean, in standard deviations",
        grid="x",
    )
    rows_named(left, [kind_title(kind_of(group)) for group in groups])
    spread = [figure_of(group, "std") for group in groups]
    right.scatter(spread, rows, c=[colors[quant_type_of(g)] for g in groups], s=26, zorder=3)
    right.margins(x=0.12)
    log_axis(right, "x")
    dress(right, x="standard deviation")
    right.tick_params(labelleft=False)
    if len(types) > 1:
        legend(made, {name: patch(colors[name]) for name in types[: len(COLORS)]})
    return made


def _reach(group: GroupPortrait) -> float:
    mean, std = figure_of(group, "mean"), figure_of(group, "std")
    return max(figure_of(group, "max") - mean, mean - figure_of(group, "min")) / std


def _box(group: GroupPortrait) -> dict[str, float]:
    """In standard deviations from the mean; missing quantiles are the nearest there are."""
    told, mean, std = group["quantiles"], figure_of(group, "mean"), figure_of(group, "std")

    def at(*names: str) -> float:
        found = next((figure_of(told, n) for n in names if math.isfinite(figure_of(told, n))), 0.0)
        return (found - mean) / std

    return {
        "whislo": at("0.01", "0.05", "0.25"),
        "q1": at("0.25"),
        "med": at("0.5"),
        "q3": at("0.75"),
        "whishi": at("0.99", "0.95", "0.75"),
        "low": at("0", "0.001", "0.01", "0.25"),
        "high": at("1", "0.999", "0.99", "0.75"),
    }


def quantile_pairs(group: GroupPortrait) -> tuple[Floats, Floats] | None:
    """Quantiles of a normal distribution and of the values, both in standard deviations."""
    told = group.get("qq") or {}
    names = [name for name in told if name not in ("p", "normal")]
    if "normal" not in told or not names:
        return None
    normal = np.asarray(told["normal"], dtype=np.float64)
    values = np.asarray(told[names[0]], dtype=np.float64)
    if normal.shape != values.shape or normal.size < 3:
        return None
    fine = np.isfinite(normal) & np.isfinite(values)
    normal, values = normal[fine], values[fine]
    mean, std = figure_of(group, "mean"), figure_of(group, "std")
    if not (fine.sum() >= 3 and std > 0 and math.isfinite(mean)):
        return None
    return normal, (values - mean) / std


def _distance(pair: tuple[Floats, Floats]) -> float:
    """The part of the spread that a straight line leaves over."""
    correlation = np.corrcoef(*pair)[0, 1]
    return float(1 - correlation**2)


def _build_normal_quantiles(analysis: DumpAnalysis) -> Sheet | None:
    found = [(group, quantile_pairs(group)) for group in analysis["groups"]]
    told = [(group, pair) for group, pair in found if pair is not None]
    shown = worst(told, lambda item: _distance(item[1]), _MOST_QQ)
    if not shown:
        return None
    (first, _), _ = shown[0]
    kurtosis = figure_of(first, "kurtosis")
    title = f"{kind_title(kind_of(first))} is farthest from a normal distribution"
    if math.isfinite(kurtosis):
        title += f": excess kurtosis {brief(kurtosis)}"
    if len(told) > len(shown):
        title += f"; the {len(shown)} farthest of {len(told)}"
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    made = sheet(max(3.6 * columns, 6.0), 2.7 * rows + 0.9, title)
    for axes, ((group, (normal, values)), _) in zip(
        panels(made, len(shown), columns), shown, strict=True
    ):
        ends = np.array([normal.min(), normal.max()])
        axes.plot(ends, ends, color=GRAY, linewidth=1.2)
        axes.plot(normal, values, "o", color=COLORS[0], markersize=3)
        name = plain(kind_title(kind_of(group), 36), 38)
        tails = f"kurtosis {brief(figure_of(group, 'kurtosis'))}"
        dress(
            axes,
            title=f"{name}\n{plain(quant_type_of(group), 20)}, {tails}",
            x="normal quantile (standard deviations)",
            y="quantile of the values",
        )
    return made


draw_magnitudes = Drawing(_build_magnitudes)
draw_boxes = Drawing(_build_boxes)
draw_normal_quantiles = Drawing(_build_normal_quantiles)
