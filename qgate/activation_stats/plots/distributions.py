"""How the values of layers are distributed: boxes of quantiles, histograms."""

from __future__ import annotations

import math

import numpy as np

from qgate.activation_stats.plots._sheet import (
    grid,
    grid_sheet,
    groups_of,
    key,
    mark,
    shared_limits,
    y_label,
)
from qgate.activation_stats.reading import (
    Layers,
    Look,
    amax,
    evenly,
    in_panel,
    name_of,
    rounding_note,
)
from qgate.activation_stats.record import ActivationsRecord
from qgate.charts.figure import dress
from qgate.charts.palette import BLACK, COLORS
from qgate.charts.sheet import (
    Sheet,
    columns_for,
    log_axis,
    note,
    panels,
    patch,
    plain,
    sheet,
    signed_log,
)
from qgate.summaries.reading import figure_of, worst
from qgate.text import brief, counted

_BLUE = COLORS[0]


def _layers(record: ActivationsRecord, pattern: str, look: Look) -> Layers:
    role = "input" if look.distribution_input else "output"
    return in_panel(record, "distribution", pattern, role)


def draw_boxes(record: ActivationsRecord, pattern: str, look: Look) -> Sheet | None:
    """Boxes of the quartiles, whiskers to the thousandths, points at the extremes."""
    layers = [each for each in _layers(record, pattern, look) if "quantiles" in each["portrait"]]
    if not layers:
        return None
    role = layers[0]["role"]
    tails = worst(layers, lambda each: figure_of(each["portrait"], "kurtosis"))
    peak = max(layers, key=lambda each: amax(each) if math.isfinite(amax(each)) else -1.0)
    title = f"The {role} of {name_of(peak, 60)} goes to {brief(amax(peak))}"
    if tails and len(layers) > 1:
        about = f"kurtosis {brief(tails[0][1])}, has {name_of(tails[0][0], 60)}"
        title += f"; the heaviest tails, {about}"
    groups, more = groups_of(layers)
    made, columns = grid_sheet(groups, title)
    drawn = grid(made, groups, columns)
    for axes, group in zip(drawn, groups, strict=True):
        boxes, ends = [], []
        for each in group.layers:
            q = each["portrait"]["quantiles"]
            names = ("0.001", "0.25", "0.5", "0.75", "0.999")
            told = [q.get(name, q["0.5"]) for name in names]
            boxes.append(dict(zip(("whislo", "q1", "med", "q3", "whishi"), told, strict=True)))
            ends.append((q["0"], q["1"]))
        made_boxes = axes.bxp(
            boxes, positions=group.places, widths=0.62, showfliers=False, patch_artist=True,
            manage_ticks=False, medianprops={"color": BLACK, "linewidth": 1.2},
        )  # fmt: skip
        for box in made_boxes["boxes"]:
            box.set(facecolor=_BLUE, alpha=0.6)
        for place in (0, 1):
            values = [pair[place] for pair in ends]
            axes.plot(group.places, values, ".", color=COLORS[1], markersize=5)
    shared_limits(drawn)
    spread = [each["portrait"]["quantiles"] for each in layers]
    sizes = [abs(q[p]) for q in spread for p in ("0.25", "0.75") if q.get(p)]
    unit = 10.0 ** math.floor(math.log10(float(np.median(sizes)))) if sizes else 1.0
    for axes in drawn:
        signed_log(axes, "y", max(unit, 1e-300))
    near = rounding_note(layers)
    quantiles = f", quantiles {near}: rounded to 16 bits" if near else ""
    y_label(made, drawn, f"value (symmetric logarithmic axis{quantiles})")
    if more:
        note(drawn[-1], more)
    entries = {
        "quartiles, whiskers to 0.1 % and 99.9 %": patch(_BLUE, alpha=0.6),
        "smallest and largest value": mark(".", COLORS[1]),
    }  # fmt: skip
    key(made, entries, look.show_legend)
    return made


def draw_histograms(record: ActivationsRecord, pattern: str, look: Look) -> Sheet | None:
    """Some layers, evenly spaced, on a logarithmic axis: tails are what matters."""
    layers = [each for each in _layers(record, pattern, look) if "histogram" in each]
    if not layers:
        return None
    shown = evenly(layers, look.histogram_layers)
    title = f"Values of {len(shown)} of {counted(len(layers), layers[0]['role'])}"
    tails = worst(shown, lambda each: figure_of(each["portrait"], "kurtosis"))
    if tails and len(shown) > 1:
        peak, value = tails[0]
        title += f": the heaviest tails, kurtosis {brief(value)}, has {name_of(peak, 60)}"
    columns = columns_for(len(shown))
    rows = -(-len(shown) // columns)
    made = sheet({1: 8.0, 2: 11.0}.get(columns, 13.0), 1.3 + 2.5 * rows, title)
    for axes, each in zip(panels(made, len(shown), columns), shown, strict=True):
        told = each["histogram"]
        counts = np.asarray(told["counts"], dtype=np.float64)
        edges = np.linspace(told["low"], told["high"], len(counts) + 1)
        axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=_BLUE, log=True)
        axes.set_ylim(0.7, 3 * max(counts.max(initial=1.0), 1.0))
        kurtosis = figure_of(each["portrait"], "kurtosis")
        about = plain(name_of(each, 46), 46)
        if math.isfinite(kurtosis):
            about += (
                f"\nkurtosis {brief(kurtosis)}, std {brief(figure_of(each['portrait'], 'std'))}"
            )
        dress(axes, title=about, x="value", y="values in the bin", grid="y")
        axes.locator_params(axis="x", nbins=6)
        log_axis(axes, "y")
    return made
