"""Attention against linear, depth, samples and batch sizes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from qgate.charts.figure import dress
from qgate.charts.palette import COLORS, GRAY
from qgate.charts.sheet import (
    Drawing,
    Sheet,
    boxes_of,
    colors_for,
    legend,
    line,
    log_axis,
    markers_for,
    panels,
    plain,
    sheet,
    signed_log,
    whole_numbers,
)
from qgate.drawing.findings import sample_findings
from qgate.drawing.plots.attention import draw_band
from qgate.drawing.plots.distributions import span_of, stacked_binades
from qgate.summaries.reading import (
    by_kind,
    figure_of,
    grouped,
    kind_title,
    layer_of,
    tensor_title,
    value_tensors,
    worst,
)
from qgate.summaries.record import DumpAnalysis, TensorPortrait
from qgate.text import brief, counted

_MOST_LINES = 8
_OUTLIERS, _FAR = 1.25, 0.5
"""Powers of two: so far from the usual size a value is named."""


def _build_types(analysis: DumpAnalysis) -> Sheet | None:
    tensors = value_tensors(analysis)
    groups = [group for group in analysis["groups"] if group.get("binades")]
    types = grouped(tensors, lambda tensor: tensor["layer_type"])
    ahead = [tensor for tensor in tensors if tensor["operation"] == "forward"]
    if len(grouped(ahead, lambda tensor: tensor["layer_type"])) >= 2:
        types = grouped(ahead, lambda tensor: tensor["layer_type"])
        groups = [group for group in groups if group["operation"] == "forward"]
    if len(types) < 2:
        return None
    types = dict(list(types.items())[: len(COLORS)])
    crest = {
        name: [figure_of(t, "amax") / figure_of(t, "rms") for t in mine if figure_of(t, "rms") > 0]
        for name, mine in types.items()
    }
    crest = {name: found for name, found in crest.items() if found}
    title = f"{len(types)} types of layers side by side"
    if crest:
        medians = {name: float(np.median(found)) for name, found in crest.items()}
        far = max(medians, key=lambda name: medians[name])
        title = f"{far} has the farther outliers: largest value {brief(medians[far])} times the rms"
        if medians[far] < _OUTLIERS * min(medians.values()):
            title = f"Outliers are alike in {len(medians)} types of layers: largest value "
            title += f"{brief(min(medians.values()))} to {brief(medians[far])} times the rms"
    made = sheet(12, 4.0, title)
    colors = colors_for(types)
    columns: list[tuple[str, dict[str, list[float]]]] = []
    for label, name in (("root mean square", "rms"), ("largest magnitude", "amax")):
        found = {n: [v for t in mine if (v := figure_of(t, name)) > 0] for n, mine in types.items()}
        columns.append((label, found))
    columns.append(("largest magnitude over rms", crest))
    columns = [(label, found) for label, found in columns if any(found.values())]
    drawn = panels(made, len(columns) + bool(groups), len(columns) + bool(groups))
    if groups:
        mine = {n: [g for g in groups if g["layer_type"] == n] for n in types}
        axes = drawn.pop(0)
        stacked_binades(axes, mine, colors)
        axes.set_xlim(*span_of(groups))
        dress(axes, x="log2 of the magnitude", y="values (%)")
        whole_numbers(axes, "x", 6)
    for axes, (label, values) in zip(drawn, columns, strict=True):
        told = {name: found for name, found in values.items() if found}
        boxes_of(
            axes, list(told.values()), range(len(told)), [colors[n] for n in told], vertical=True
        )
        axes.set_xticks(range(len(told)), [plain(name, 12) for name in told])
        axes.set_xlim(-0.6, len(told) - 0.4)
        axes.margins(y=0.06)
        log_axis(axes, "y")
        dress(axes, y=label, grid="y")
        if len(told) > 3:
            axes.tick_params(axis="x", rotation=30)
    legend(made, {name: line(colors[name], linewidth=4) for name in types})
    return made


def _build_depth(analysis: DumpAnalysis) -> Sheet | None:
    tensors = [t for t in value_tensors(analysis) if layer_of(t) is not None]
    layers = {layer_of(tensor) for tensor in tensors}
    if len(layers) < 2:
        return None
    top, amax = worst(tensors, lambda tensor: figure_of(tensor, "amax"))[0]
    over = counted(len(layers), "layer")
    title = f"Largest magnitude over {over}: {brief(amax)} at {tensor_title(top)}"
    lines = grouped(tensors, lambda tensor: f"{tensor['layer_type']} {tensor['operation']}")
    lines = dict(list(lines.items())[:_MOST_LINES])
    colors, markers = colors_for(lines), markers_for(lines)
    told = [
        (label, name)
        for label, name in (
            ("largest magnitude", "amax"),
            ("root mean square", "rms"),
            ("excess kurtosis", "kurtosis"),
        )
        if any(figure_of(t, name) > 0 for t in tensors)
    ]
    if not told:
        return None
    made = sheet(4.2 * len(told), 3.8, title)
    for axes, (label, name) in zip(panels(made, len(told), len(told)), told, strict=True):
        for kind, mine in lines.items():
            draw_band(axes, mine, name, colors[kind], markers[kind])
        if name == "kurtosis":
            axes.set_ylim(bottom=0)
            signed_log(axes, "y", 1.0)
        else:
            log_axis(axes, "y")
        dress(axes, x="layer", y=label)
        whole_numbers(axes, "x", 10)
    legend(
        made,
        {n: line(colors[n], markers[n]) for n in lines},
        title="median, and from least to largest",
    )
    return made


def _build_by(
    analysis: DumpAnalysis,
    field: Callable[[TensorPortrait], int | None],
    words: str,
    verdict: str = "",
) -> Sheet | None:
    """The root mean square of each kind of tensor against its median over all. The title names a
    value only where enough tensors support it, or where `verdict` does."""
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
            value or 0: float(np.median([figure_of(t, "rms") for t in found]))
            for value, found in by_value.items()
        }
        middle = float(np.median(list(medians.values())))
        lines[kind_title(kind)] = {value: found / middle for value, found in medians.items()}
        fewest[kind_title(kind)] = min(map(len, by_value.values()))
    if not lines:
        return None

    def reach(name: str) -> float:
        return max(abs(math.log2(v)) for v in lines[name].values())

    shown = worst(lines, reach, _MOST_LINES)
    title = verdict or f"No difference between {len(values)} values of {words.lower()} stands out"
    supported = [n for n, far in worst(lines, reach, len(lines)) if far > _FAR and fewest[n] >= 3]
    if supported and not verdict:
        far = supported[0]
        value = max(lines[far], key=lambda v: abs(math.log2(lines[far][v])))
        ratio = brief(lines[far][value])
        title = f"{words} {value}: {far} has {ratio} times its usual root mean square"
    if len(lines) > len(shown):
        title += f"; the {len(shown)} largest of {len(lines)} kinds"
    names = [name for name, _ in shown]
    colors, markers = colors_for(names), markers_for(names)
    made = sheet(9.5, 4.2, title)
    axes = made.figure.subplots()
    places = {value: place for place, value in enumerate(values)}
    axes.axhline(1, color=GRAY, linewidth=1)
    # Lines between two values would only cross.
    style = "-" if len(values) > 2 else "none"
    for name in names:
        points = sorted((places[value], ratio) for value, ratio in lines[name].items())
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=colors[name], marker=markers[name], markersize=5, linestyle=style)
    axes.margins(y=0.1)
    log_axis(axes, "y")
    step = -(-len(values) // 30)
    axes.set_xticks(range(0, len(values), step), [str(value) for value in values[::step]])
    axes.set_xlim(-0.4, len(values) - 0.6)
    dress(axes, x=words.lower(), y="root mean square over its median")
    legend(made, {n: line(colors[n], markers[n], linestyle=style) for n in names}, columns=3)
    return made


def _build_samples(analysis: DumpAnalysis) -> Sheet | None:
    cells = analysis.get("samples") or []
    told = sample_findings(analysis) if cells else []
    verdict = told[0].text.rstrip(".") if told else ""
    if cells and not told:
        verdict = "Of 2 samples none can be said to stand out"
    return _build_by(analysis, lambda tensor: tensor.get("sample"), "Sample", verdict)


def _build_batches(analysis: DumpAnalysis) -> Sheet | None:
    def first(tensor: TensorPortrait) -> int | None:
        shape = tensor.get("shape") or []
        weight = "weight" in str(tensor["name"])
        return None if weight or len(shape) < 2 else int(shape[0])

    return _build_by(analysis, first, "First dimension")


draw_layer_types = Drawing(_build_types)
draw_depth = Drawing(_build_depth)
draw_samples = Drawing(_build_samples)
draw_batches = Drawing(_build_batches)
