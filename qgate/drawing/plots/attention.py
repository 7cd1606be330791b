"""Query, key, value and context by layer, and where attention goes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from qgate.charts.figure import dress
from qgate.charts.palette import BLACK, COLORS, MAP
from qgate.charts.sheet import (
    Drawing,
    Sheet,
    color_bar,
    columns_for,
    legend,
    line,
    log_axis,
    panels,
    patch,
    plain,
    sheet,
    type_colors,
    whole_numbers,
    wrapped,
)
from qgate.drawing.plots.heatmaps import map_layers, maps_of
from qgate.summaries.reading import (
    figure_of,
    grouped,
    layer_of,
    quant_type_of,
    row_titles,
    tensor_title,
    value_tensors,
    worst,
)
from qgate.summaries.record import DumpAnalysis, TensorPortrait
from qgate.text import brief, counted, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ALIKE = 0.9
_ORDER = ("query", "key", "value", "context", "attention_weights", "output")


def draw_band(
    axes: Axes, tensors: list[TensorPortrait], name: str, color: str, marker: str
) -> None:
    """The median of each layer as a line, from the least to the largest as a band."""
    by_layer = grouped((t for t in tensors if figure_of(t, name) > 0), layer_of)
    known = sorted(layer for layer in by_layer if layer is not None)
    told = [[figure_of(t, name) for t in by_layer[layer]] for layer in known]
    if not told:
        return
    axes.fill_between(
        known, [min(v) for v in told], [max(v) for v in told], color=color, alpha=0.15, linewidth=0
    )
    shape = "" if len(known) > 40 else marker
    axes.plot(known, [np.median(v) for v in told], color=color, marker=shape, markersize=5)


def _build_layers(analysis: DumpAnalysis) -> Sheet | None:
    tensors = [
        t
        for t in value_tensors(analysis)
        if t["layer_type"] == "attention" and layer_of(t) is not None and figure_of(t, "amax") > 0
    ]
    names = grouped(tensors, lambda tensor: tensor["name"])
    order = sorted(names, key=lambda n: _ORDER.index(n) if n in _ORDER else len(_ORDER))[:6]
    if not order:
        return None
    top, amax = worst(tensors, lambda tensor: figure_of(tensor, "amax"))[0]
    title = f"The largest magnitude in attention is {brief(amax)}, in {tensor_title(top)}"
    columns = min(4, len(order)) if len(order) != 6 else 3
    rows = -(-len(order) // columns)
    made = sheet(max(3.5 * columns, 6.4), 2.9 * rows + 1.0, title)
    types = list(grouped(tensors, quant_type_of))[: len(COLORS)]
    colors = type_colors(types)
    for axes, name in zip(panels(made, len(order), columns), order, strict=True):
        for kind in types:
            mine = [t for t in names[name] if quant_type_of(t) == kind]
            draw_band(axes, mine, "amax", colors[kind], "o")
            draw_band(axes, mine, "rms", colors[kind], "s")
        log_axis(axes, "y")
        dress(axes, title=plain(name, 30), x="layer", y="magnitude")
        whole_numbers(axes, "x", 8)
    entries = {
        **{kind: patch(colors[kind]) for kind in types},
        "largest magnitude (band: all tensors)": line(BLACK, "o"),
        "root mean square": line(BLACK, "s"),
    }
    legend(made, entries)
    return made


def _build_maps(analysis: DumpAnalysis) -> Sheet | None:
    shown = [(told, cells) for told, cells in maps_of(analysis, "attention") if (cells > 0).any()]
    if not shown:
        return None
    sinks = worst([told for told, _ in shown], lambda told: figure_of(told, "first_key"))
    title = f"Where attention goes in {len(shown)} maps"
    if sinks:
        share = percent(sinks[0][1])
        title = f"{share} of attention goes to the first key in {tensor_title(sinks[0][0])}"
    columns = columns_for(len(shown))
    rows = -(-len(shown) // columns)
    made = sheet(max(3.9 * columns, 6.4), 3.8 * rows + 0.7, title)
    from matplotlib.colors import LogNorm

    image = None
    norm = LogNorm(1e-4, 1.0, clip=True)
    drawn = panels(made, len(shown), columns)
    names = row_titles([told for told, _ in shown], 90)
    for axes, name, (told, cells) in zip(drawn, names, shown, strict=True):
        image = axes.imshow(
            np.where(cells > 0, cells, np.nan), cmap=MAP, norm=norm, aspect="auto",
            interpolation="nearest", extent=(0, told["columns"], told["rows"], 0),
        )  # fmt: skip
        bits, first = figure_of(told, "entropy_bits"), figure_of(told, "first_key")
        said = [f"entropy {brief(bits)} bits"] if math.isfinite(bits) else []
        said += [f"first key {percent(first)}"] if math.isfinite(first) else []
        title = "\n".join(filter(None, [wrapped(name, 42), ", ".join(said)]))
        dress(axes, title=title, x="key", y="query", grid="")
    if image is not None:
        color_bar(made, image, drawn, "attention weight, largest of a cell", extend="min")
    return made


def _build_focus(analysis: DumpAnalysis) -> Sheet | None:
    """Entropy and the share of the first key over the layers."""
    maps = [told for told in analysis["maps"] if told["kind"] == "attention"]
    layers = map_layers(analysis, maps)
    told = {
        name: sorted(
            (layer, figure_of(maps[place], name))
            for place, layer in layers.items()
            if layer is not None and math.isfinite(figure_of(maps[place], name))
        )
        for name in ("entropy_bits", "first_key")
    }
    if any(len({layer for layer, _ in points}) < 2 for points in told.values()):
        return None
    (low, bits), (_, most) = (
        end(told["entropy_bits"], key=lambda point: point[1]) for end in (min, max)
    )
    over = counted(len({layer for layer, _ in told["entropy_bits"]}), "layer")
    title = f"Attention is narrowest in layer {low}: {brief(bits)} bits of entropy"
    if bits > _ALIKE * most:
        title = f"Attention is alike in {over}: {brief(bits)} to {brief(most)} bits of entropy"
    made = sheet(9, 3.4, title)
    for axes, (name, label, factor) in zip(
        panels(made, 2, 2),
        (
            ("entropy_bits", "entropy (bits)", 1.0),
            ("first_key", "share on the first key (%)", 100.0),
        ),
        strict=True,
    ):
        means = grouped(told[name], lambda point: point[0])
        middle = [float(np.median([value for _, value in found])) for found in means.values()]
        axes.plot(list(means), np.asarray(middle) * factor, color=COLORS[0], linewidth=1.2)
        x, y = zip(*told[name], strict=True)
        axes.plot(x, np.asarray(y) * factor, "o", color=COLORS[0])
        axes.set_ylim(0, max(1.15 * factor * max(y), 1e-3))
        dress(axes, x="layer", y=label)
        whole_numbers(axes, "x", 10)
    dot = line(COLORS[0], "o", linestyle="none")
    legend(made, {"one map": dot, "median of the layer": line(COLORS[0])})
    return made


draw_attention_layers = Drawing(_build_layers)
draw_attention_maps = Drawing(_build_maps)
draw_attention_focus = Drawing(_build_focus)
