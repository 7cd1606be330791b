"""Distributions of the values of layers: boxes of quantiles, histograms."""

from __future__ import annotations

import math

import numpy as np

from qgate.activation_stats.plots._sheet import (
    group_sheet,
    groups_of,
    key,
    mark,
    panel_sheet,
    shared_limits,
    y_label,
)
from qgate.activation_stats.reading import (
    Layers,
    amax,
    in_panel,
    name_of,
    rounding_note,
    spread_evenly,
)
from qgate.activation_stats.record import ActivationsRecord, LayerActivations
from qgate.activation_stats.settings import ViewSettings
from qgate.charts.figure import dress
from qgate.charts.palette import COLORS
from qgate.charts.sheet import Sheet, log_axis, note, patch, plain, quartile_boxes, signed_log
from qgate.summaries.reading import figure_of, worst
from qgate.text import brief, counted

_BLUE = COLORS[0]
_CUTS = {"whislo": "0.001", "q1": "0.25", "med": "0.5", "q3": "0.75", "whishi": "0.999"}


def _layers(record: ActivationsRecord, pattern: str, view: ViewSettings) -> Layers:
    role = "input" if view.distribution.is_input else "output"
    return in_panel(record, "distribution", pattern, role)


def _kurtosis(layer: LayerActivations) -> float:
    return figure_of(layer["portrait"], "kurtosis")


def draw_boxes(record: ActivationsRecord, pattern: str, view: ViewSettings) -> Sheet | None:
    """Draw boxes of the quartiles, whiskers to the thousandths, points at the extremes."""
    layers = _layers(record, pattern, view)
    layers = [layer for layer in layers if "quantiles" in layer["portrait"]]
    if not layers:
        return None
    tails = worst(layers, _kurtosis)
    peak = max(layers, key=lambda layer: amax(layer) if math.isfinite(amax(layer)) else -1.0)
    title = f"The {layers[0]['role']} of {name_of(peak, 60)} goes to {brief(amax(peak))}"
    if tails and len(layers) > 1:
        about = f"kurtosis {brief(tails[0][1])}, has {name_of(tails[0][0], 60)}"
        title += f"; the heaviest tails, {about}"
    groups, more = groups_of(layers)
    page, all_axes = group_sheet(groups, title)
    for axes, group in zip(all_axes, groups, strict=True):
        cuts = [layer["portrait"]["quantiles"] for layer in group.layers]
        quartiles = [{part: q.get(p, q["0.5"]) for part, p in _CUTS.items()} for q in cuts]
        quartile_boxes(axes, quartiles, group.ticks, [_BLUE] * len(cuts), vertical=True)
        for end in ("0", "1"):
            ends = [q[end] for q in cuts]
            axes.plot(group.ticks, ends, ".", color=COLORS[1], markersize=5, clip_on=False)
    shared_limits(all_axes)
    every = [layer["portrait"]["quantiles"] for layer in layers]
    sizes = [abs(q[p]) for q in every for p in ("0.25", "0.75") if q.get(p)]
    unit = 10.0 ** math.floor(math.log10(float(np.median(sizes)))) if sizes else 1.0
    for axes in all_axes:
        signed_log(axes, "y", max(unit, 1e-300))
    near = rounding_note(layers)
    quantiles = f", quantiles {near}: rounded to 16 bits" if near else ""
    y_label(page, all_axes, f"value (symmetric logarithmic axis{quantiles})")
    if more:
        note(all_axes[-1], more)
    entries = {
        "quartiles, whiskers to 0.1 % and 99.9 %": patch(_BLUE, alpha=0.75),
        "smallest and largest value": mark(".", COLORS[1]),
    }
    return key(page, entries, view.show_legend)


def draw_histograms(record: ActivationsRecord, pattern: str, view: ViewSettings) -> Sheet | None:
    """Draw evenly spaced layers on a logarithmic axis, which shows the tails."""
    layers = [layer for layer in _layers(record, pattern, view) if "histogram" in layer]
    if not layers:
        return None
    chosen = spread_evenly(layers, view.distribution.num_layers_to_show)
    title = f"Values of {len(chosen)} of {counted(len(layers), layers[0]['role'])}"
    tails = worst(chosen, _kurtosis)
    if tails and len(chosen) > 1:
        peak, value = tails[0]
        title += f": the heaviest tails, kurtosis {brief(value)}, has {name_of(peak, 60)}"
    widths = (8.0, 11.0, 13.0)
    page, all_axes = panel_sheet(len(chosen), title, widths=widths, base=1.3, row_height=2.5)
    for axes, layer in zip(all_axes, chosen, strict=True):
        histogram = layer["histogram"]
        counts = np.asarray(histogram["counts"], dtype=np.float64)
        edges = np.linspace(histogram["low"], histogram["high"], len(counts) + 1)
        axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=_BLUE, log=True)
        axes.set_ylim(0.7, 3 * max(counts.max(initial=1.0), 1.0))
        about = plain(name_of(layer, 46), 46)
        if math.isfinite(_kurtosis(layer)):
            std = brief(figure_of(layer["portrait"], "std"))
            about += f"\nkurtosis {brief(_kurtosis(layer))}, std {std}"
        dress(axes, title=about, x="value", y="values in the bin", grid="y")
        axes.locator_params(axis="x", nbins=6)
        log_axis(axes, "y")
    return page
