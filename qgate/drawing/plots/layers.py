"""Layers, samples and batches: magnitudes by depth, channels that stand out, attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from qgate.charts import shapes
from qgate.charts import sheet as charts
from qgate.charts.figure import SMALL, dress
from qgate.charts.palette import BLACK, COLORS, GRAY, WARN
from qgate.charts.sheet import Sheet, plain
from qgate.drawing.findings import sample_findings
from qgate.summaries.reading import (
    by_kind,
    figure_of,
    grouped,
    kind_title,
    layer_of,
    outliers,
    quant_type_of,
    row_titles,
    tensor_title,
    value_tensors,
    worst,
)
from qgate.summaries.record import DumpAnalysis, TensorSummary
from qgate.text import brief, counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_LINES, _MOST_CURVES, _MOST_NAMED = 8, 9, 3
_FAR = 0.5
"""A value that is so many powers of two from the usual size is named."""
_ATTENTION = ("query", "key", "value", "context", "attention_weights", "output")
_DEPTH_LABELS = {
    "amax": "largest magnitude", "rms": "root mean square", "kurtosis": "excess kurtosis",
}  # fmt: skip


def _draw_band(
    axes: Axes, tensors: list[TensorSummary], name: str, color: str, marker: str
) -> None:
    """Draw the median of each layer as a line, in a band from the least to the largest."""
    by_layer = grouped((t for t in tensors if figure_of(t, name) > 0), layer_of)
    layers = sorted(layer for layer in by_layer if layer is not None)
    sizes = [[figure_of(tensor, name) for tensor in by_layer[layer]] for layer in layers]
    if sizes:
        ends = [min(values) for values in sizes], [max(values) for values in sizes]
        axes.fill_between(layers, *ends, color=color, alpha=0.15, linewidth=0)
        medians = [np.median(values) for values in sizes]
        shape = "" if len(layers) > 40 else marker
        axes.plot(layers, medians, color=color, marker=shape, markersize=5)


def depth(analysis: DumpAnalysis) -> Sheet | None:
    tensors = [t for t in value_tensors(analysis) if layer_of(t) is not None]
    layers = {layer_of(tensor) for tensor in tensors}
    columns = {
        name: label
        for name, label in _DEPTH_LABELS.items()
        if any(figure_of(tensor, name) > 0 for tensor in tensors)
    }
    if len(layers) < 2 or not columns:
        return None
    top, amax = worst(tensors, lambda tensor: figure_of(tensor, "amax"))[0]
    over = counted(len(layers), "layer")
    title = f"Largest magnitude over {over}: {brief(amax)} at {tensor_title(top)}"
    lines = grouped(tensors, lambda tensor: f"{tensor['layer_type']} {tensor['operation']}")
    lines = dict(list(lines.items())[:_MOST_LINES])
    colors, markers = charts.colors_for(lines), charts.markers_for(lines)
    page, panels = shapes.tiles(title, len(columns), (4.2, 3.8), extra=0, least=0)
    for axes, (name, label) in zip(panels, columns.items(), strict=True):
        for kind, mine in lines.items():
            _draw_band(axes, mine, name, colors[kind], markers[kind])
        if name == "kurtosis":
            axes.set_ylim(bottom=0)
            charts.signed_log(axes, "y", 1.0)
        else:
            charts.log_axis(axes, "y")
        dress(axes, x="layer", y=label)
        charts.whole_numbers(axes, "x", 10)
    entries = shapes.keys(colors, markers, linestyle="-")
    charts.legend(page, entries, title="median, and from least to largest")
    return page


def attention(analysis: DumpAnalysis) -> Sheet | None:
    tensors = [
        t
        for t in value_tensors(analysis)
        if t["layer_type"] == "attention" and layer_of(t) is not None and figure_of(t, "amax") > 0
    ]
    by_name = grouped(tensors, lambda tensor: tensor["name"])
    order = [*_ATTENTION, *by_name]
    names = sorted(by_name, key=order.index)[:6]
    if not names:
        return None
    top, amax = worst(tensors, lambda tensor: figure_of(tensor, "amax"))[0]
    title = f"The largest magnitude in attention is {brief(amax)}, in {tensor_title(top)}"
    columns = 3 if len(names) == 6 else 4
    page, panels = shapes.tiles(title, len(names), (3.5, 2.9), columns=columns)
    types = list(grouped(tensors, quant_type_of))[: len(COLORS)]
    colors = charts.type_colors(types)
    for axes, name in zip(panels, names, strict=True):
        mine = grouped(by_name[name], quant_type_of)
        for kind in types:
            _draw_band(axes, mine.get(kind, []), "amax", colors[kind], "o")
            _draw_band(axes, mine.get(kind, []), "rms", colors[kind], "s")
        charts.log_axis(axes, "y")
        dress(axes, title=plain(name, 30), x="layer", y="magnitude")
        charts.whole_numbers(axes, "x", 8)
    entries = {
        **shapes.patches(colors),
        "largest magnitude (band: all tensors)": charts.line(BLACK, "o"),
        "root mean square": charts.line(BLACK, "s"),
    }
    charts.legend(page, entries)
    return page


def channels(analysis: DumpAnalysis) -> Sheet | None:
    wide = [t for t in analysis["tensors"] if t.get("channels") and len(t["channels"]["curve"]) > 1]
    curves = worst(wide, outliers, _MOST_CURVES)
    if not curves:
        return None
    first, factor = curves[0]
    channel = int(first["channels"]["largest"][0][0])
    times = f"{brief(factor)} times"
    title = f"Channel {channel} of {tensor_title(first)} reaches {times} the median channel"
    title += shapes.part_of(len(curves), len(wide), "worst", "tensors")
    page, panels = shapes.tiles(title, len(curves), (3.9, 2.5), extra=0.9)
    titles = row_titles([tensor for tensor, _ in curves], 90)
    for axes, name, (tensor, factor) in zip(panels, titles, curves, strict=True):
        record = tensor["channels"]
        curve = np.maximum(np.asarray(record["curve"], dtype=np.float64), 0)
        ranks = np.linspace(1, record["count"], len(curve))
        axes.plot(ranks, np.where(curve > 0, curve, np.nan), color=COLORS[0], linewidth=1.6)
        axes.axhline(record["median"], color=GRAY, linewidth=1, linestyle="--")
        axes.margins(y=0.12)
        charts.log_axis(axes, "y")
        largest = record["largest"][:_MOST_NAMED]
        large = [(i, size) for i, size in largest if size > 5 * record["median"]]
        axes.plot(range(1, len(large) + 1), [s for _, s in large], "o", color=WARN, markersize=5)
        names = ", ".join(f"{i} ({brief(size)})" for i, size in large)
        label = f"channel{'s' if len(large) > 1 else ''} {names}" if large else "no outliers"
        axes.text(
            0.97, 0.95, f"{label}\n{brief(factor)}× the median", transform=axes.transAxes,
            ha="right", va="top", fontsize=SMALL, color=WARN if large else BLACK,
        )  # fmt: skip
        words = f"channels by largest magnitude ({record['count']:,})"
        dress(axes, title=charts.two_lines(name, 42), x=words, y="largest magnitude")
    entries = {
        "largest magnitude of each channel": charts.line(COLORS[0]),
        "median channel": charts.line(GRAY, linestyle="--"),
        "more than 5 times the median": charts.line(WARN, "o", linestyle="none"),
    }
    charts.legend(page, entries)
    return page


# Samples and batches -----------------------------------------------------------------------------


def _by_value(
    analysis: DumpAnalysis,
    field: Callable[[TensorSummary], int | None],
    words: str,
    verdict: str = "",
) -> Sheet | None:
    """Draw the root mean square of each kind of tensor against its median over all. The title names
    a value only where enough tensors support it, or where `verdict` does."""
    tensors = [
        t for t in value_tensors(analysis) if figure_of(t, "rms") > 0 and field(t) is not None
    ]
    values = sorted({field(tensor) or 0 for tensor in tensors})
    if len(values) < 2:
        return None
    lines: dict[str, dict[int, float]] = {}
    fewest: dict[str, int] = {}
    for kind, mine in by_kind(tensors).items():
        by_value = grouped(mine, field)
        if len(by_value) < 2:
            continue
        medians = {
            value or 0: float(np.median([figure_of(tensor, "rms") for tensor in group]))
            for value, group in by_value.items()
        }
        middle = float(np.median(list(medians.values())))
        lines[kind_title(kind)] = {value: median / middle for value, median in medians.items()}
        fewest[kind_title(kind)] = min(map(len, by_value.values()))
    if not lines:
        return None

    def reach(name: str) -> float:
        return max(abs(math.log2(ratio)) for ratio in lines[name].values())

    farthest = worst(lines, reach, len(lines))
    names = [name for name, _ in farthest[:_MOST_LINES]]
    title = verdict or f"No difference between {len(values)} values of {words.lower()} stands out"
    supported = [name for name, far in farthest if far > _FAR and fewest[name] >= 3]
    if supported and not verdict:
        ratios = lines[supported[0]]
        value = max(ratios, key=lambda v: abs(math.log2(ratios[v])))
        times = f"{brief(ratios[value])} times its usual root mean square"
        title = f"{words} {value}: {supported[0]} has {times}"
    title += shapes.part_of(len(names), len(lines), "largest", "kinds")
    colors, markers = charts.colors_for(names), charts.markers_for(names)
    page, axes = shapes.single(title, 9.5, 4.2)
    axes.axhline(1, color=GRAY, linewidth=1)
    # Lines between two values would only cross.
    style = "-" if len(values) > 2 else "none"
    for name in names:
        points = sorted((values.index(value), ratio) for value, ratio in lines[name].items())
        axes.plot(
            *zip(*points, strict=True), color=colors[name], marker=markers[name], markersize=5,
            linestyle=style,
        )  # fmt: skip
    axes.margins(y=0.1)
    charts.log_axis(axes, "y")
    step = -(-len(values) // 30)
    axes.set_xticks(range(0, len(values), step), [str(value) for value in values[::step]])
    axes.set_xlim(-0.4, len(values) - 0.6)
    dress(axes, x=words.lower(), y="root mean square over its median")
    charts.legend(page, shapes.keys(colors, markers, linestyle=style), columns=3)
    return page


def samples(analysis: DumpAnalysis) -> Sheet | None:
    cells = analysis.get("samples") or []
    sentences = sample_findings(analysis) if cells else []
    verdict = sentences[0].text.rstrip(".") if sentences else ""
    if cells and not sentences:
        verdict = "Of 2 samples none can be said to stand out"
    return _by_value(analysis, lambda tensor: tensor.get("sample"), "Sample", verdict)


def batches(analysis: DumpAnalysis) -> Sheet | None:
    def first(tensor: TensorSummary) -> int | None:
        shape = tensor.get("shape") or []
        return None if "weight" in str(tensor["name"]) or len(shape) < 2 else int(shape[0])

    return _by_value(analysis, first, "First dimension")
