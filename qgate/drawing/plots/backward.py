"""Gradients against activations, what formats make of them, and the scale of the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from qgate.charts.figure import SMALL, TICK, dress
from qgate.charts.palette import BLACK, COCOA, COLORS, INDIGO, ORANGE, WARN, WINE
from qgate.charts.sheet import (
    Drawing,
    Sheet,
    bars,
    height_for,
    legend,
    line,
    panels,
    patch,
    plain,
    rows_named,
    share_axis,
    sheet,
    whole_numbers,
)
from qgate.drawing.losses import share_in
from qgate.drawing.plots.distributions import (
    border_entries,
    border_formats,
    draw_borders,
    span_of,
    stacked_binades,
)
from qgate.summaries.reading import (
    fates,
    figure_of,
    figures_of,
    flushed,
    format_names,
    grouped,
    is_gradient,
    tensor_title,
)
from qgate.summaries.record import DumpAnalysis, GroupPortrait
from qgate.text import counted, percent

_DIRECTIONS = {"forward": COLORS[0], "backward": COLORS[1]}


def _directions(groups: Sequence[GroupPortrait]) -> dict[str, list[GroupPortrait]]:
    told = {
        name: [
            group
            for group in groups
            if group["operation"] == name and group.get("binades")
            and (name == "forward" or is_gradient(group))
        ]
        for name in _DIRECTIONS
    }  # fmt: skip
    return told if all(told.values()) else {}


def _gap(told: Mapping[str, Sequence[GroupPortrait]]) -> str:
    """How much smaller the gradients are, in words; empty where that is not known."""
    sizes = []
    for groups in told.values():
        rms, weights = figures_of(groups, "rms"), figures_of(groups, "counted")
        if not rms.size or rms.size != weights.size or not weights.sum() > 0:
            return ""
        sizes.append(math.sqrt(float((rms**2 * weights).sum() / weights.sum())))
    if not all(size > 0 for size in sizes):
        return ""
    binades = math.log2(sizes[0] / sizes[1])
    return (
        f": {abs(binades):.0f} binades {'below' if binades >= 0 else 'above'} by root mean square"
    )


def _build_directions(analysis: DumpAnalysis) -> Sheet | None:
    told = _directions(analysis["groups"])
    if not told:
        return None
    made = sheet(9.5, 4.4, f"Gradients against forward tensors{_gap(told)}")
    axes = made.figure.subplots()
    borders = border_formats(analysis)
    stacked_binades(axes, told, _DIRECTIONS)
    axes.set_xlim(*span_of([group for groups in told.values() for group in groups]))
    draw_borders(axes, borders)
    dress(axes, x="log2 of the magnitude", y="values (%)")
    whole_numbers(axes, "x", 14)
    names = {"forward": "forward", "backward": "gradients"}
    entries = {names[n]: line(color, linewidth=2) for n, color in _DIRECTIONS.items()}
    legend(made, {**entries, **border_entries(borders)}, columns=5)
    return made


def _build_types(analysis: DumpAnalysis) -> Sheet | None:
    """The gradients of each type of layer and name, with what flows forward in pale."""
    types = grouped(analysis["groups"], lambda group: group["layer_type"])
    told = {name: _directions(groups) for name, groups in types.items()}
    told = dict([item for item in told.items() if item[1]][:6])
    only = [g for g in analysis["groups"] if is_gradient(g) and g.get("binades")]
    names = dict(list(grouped(only, lambda g: g["name"]).items())[:5])
    if not names or len(told) + len(names) < 2:
        return None
    low = min(names, key=lambda n: span_of(names[n])[0])
    lowest = f"2^{span_of(names[low])[0] + 1:.0f}"
    title = f"{low} reaches lowest of {counted(len(names), 'kind')} of gradients: {lowest}"
    count = len(told) + 1
    columns = min(3, count)
    made = sheet(max(4.6 * columns, 6.4), 3.1 * -(-count // columns) + 1.0, title)
    drawn = panels(made, count, columns)
    borders = border_formats(analysis)
    for axes, (layer_type, mine) in zip(drawn, told.items(), strict=False):
        stacked_binades(axes, mine, _DIRECTIONS)
        axes.set_xlim(*span_of([group for groups in mine.values() for group in groups]))
        draw_borders(axes, borders)
        dress(
            axes,
            title=f"{plain(layer_type, 24)}: forward and gradients",
            x="log2 of the magnitude",
            y="values (%)",
        )
        whole_numbers(axes, "x", 8)
    axes = drawn[-1]
    colors = dict(zip(names, (INDIGO, WINE, COCOA, ORANGE, BLACK), strict=False))
    stacked_binades(axes, names, colors)
    axes.set_xlim(*span_of(only))
    draw_borders(axes, borders)
    dress(axes, title="gradients by name", x="log2 of the magnitude", y="values (%)")
    whole_numbers(axes, "x", 8)
    entries = {n: line(color, linewidth=2) for n, color in _DIRECTIONS.items()} if told else {}
    entries |= {name: line(colors[name], linewidth=2) for name in names}
    legend(made, {**entries, **border_entries(borders)}, columns=5)
    return made


def _build_flush(analysis: DumpAnalysis) -> Sheet | None:
    gradients = [tensor for tensor in analysis["tensors"] if is_gradient(tensor)]
    told = {}
    for name in format_names(analysis):
        share = share_in(gradients, name, flushed)
        found = [(flushed(fate), t) for t, fate in fates(gradients, name) if flushed(fate) >= 0]
        if found and math.isfinite(share):
            told[name] = (share, *max(found, key=lambda item: item[0]))
    told = dict(sorted(told.items(), key=lambda item: -item[1][0]))
    if not told or max(worst for _, worst, _ in told.values()) == 0:
        return None
    name, (share, most, tensor) = next(iter(told.items()))
    title = (
        f"{percent(share)} of the gradients become zero in {name}, {percent(most)} in "
        f"{tensor_title(tensor)}"
    )
    made = sheet(9.5, height_for(len(told), 0.36, 2.7), title)
    axes = made.figure.subplots()
    low = min(value for s, w, _ in told.values() for value in (s, w) if value > 0) / 3
    for row, (share, most, _) in enumerate(told.values()):
        bars(axes, [share if share > 0 else low], [row], COLORS[0] if share > 0 else "none", 0.62)
        if most > 0:
            axes.plot([most], [row], "D", color=WARN, markersize=6, clip_on=False)
        axes.annotate(
            percent(share) if share > 0 else "none", (max(share, most, low), row), (9, 0),
            textcoords="offset points", va="center", fontsize=TICK,
        )  # fmt: skip
    axes.set_xlim(low, 6)
    share_axis(axes)
    axes.set_xticks([tick for tick in axes.get_xticks() if low <= tick <= 1])
    rows_named(axes, list(told))
    dress(
        axes,
        x="share of gradients that become zero: cast as they are, or with the format's own scales",
        grid="x",
    )
    entries = {"all gradients": patch(COLORS[0]), "worst tensor": line(WARN, "D", linestyle="none")}
    legend(made, entries)
    return made


def _build_loss_scale(analysis: DumpAnalysis) -> Sheet | None:
    told = analysis["loss_scales"]
    if not told:
        return None
    narrow = [row for row in told if row["least"] > row["largest"]]
    worst = max(told, key=lambda row: figure_of(row, "flush"))
    title = (
        f"{narrow[0]['format']} has no loss scale that saves all gradients: at the best one "
        f"{percent(figure_of(narrow[0], 'at_best'))} still become zero"
        if narrow
        else f"Loss scale 2^{worst['advised']} for {worst['format']}: gradients that become zero "
        f"fall from {percent(figure_of(worst, 'flush'))} to {percent(figure_of(worst, 'at_best'))}"
    )
    made = sheet(9.5, height_for(len(told), 0.42, 2.7), title)
    axes = made.figure.subplots()
    for row, found in enumerate(told):
        ends = sorted((found["least"], found["largest"]))
        empty = found["least"] > found["largest"]
        color = WARN if empty else COLORS[2]
        axes.barh(
            [row], [max(ends[1] - ends[0], 0.15)], left=[ends[0]], height=0.5, color=color,
            alpha=0.35 if empty else 0.6,
        )  # fmt: skip
        axes.plot([found["advised"]], [row], "D", color=BLACK, markersize=7)
        axes.annotate(
            f"advised 2^{found['advised']}: zeros {percent(figure_of(found, 'flush'))} to "
            f"{percent(figure_of(found, 'at_best'))}",
            (max(ends[1], found["advised"]), row), (9, 0), textcoords="offset points", va="center",
            fontsize=SMALL,
        )  # fmt: skip
    low = min(min(r["least"], r["largest"], r["advised"]) for r in told)
    high = max(max(r["least"], r["largest"], r["advised"]) for r in told)
    axes.set_xlim(low - 1, high + 0.62 * max(high - low, 6) + 1)
    rows_named(axes, [row["format"] for row in told])
    whole_numbers(axes, "x", 14)
    axes.set_xticks([tick for tick in axes.get_xticks() if low - 1 <= tick <= high + 1])
    dress(axes, x="exponent of the loss scale (a power of two)", grid="x")
    entries = {
        "at most 0.1 % become zero, none saturates": patch(COLORS[2], alpha=0.6),
        "both at once is not possible": patch(WARN, alpha=0.35),
        "advised": line(BLACK, "D", linestyle="none"),
    }
    if not narrow:
        entries.pop("both at once is not possible")
    legend(made, entries)
    return made


draw_directions = Drawing(_build_directions)
draw_gradients = Drawing(_build_types)
draw_gradient_flush = Drawing(_build_flush)
draw_loss_scale = Drawing(_build_loss_scale)
