"""Largest, median and smallest magnitudes of every layer: input, output, weight."""

from __future__ import annotations

import math

from qgate.activation_stats.plots._sheet import (
    group_sheet,
    groups_of,
    key,
    shared_limits,
    y_label,
)
from qgate.activation_stats.reading import Layers, in_panel, name_of, rounding_note
from qgate.activation_stats.record import ActivationsRecord, LayerActivations
from qgate.activation_stats.settings import ViewSettings
from qgate.charts.palette import BLUE, GREEN, ORANGE, PINK, PURPLE, SKY, WHITE, YELLOW
from qgate.charts.sheet import Sheet, line, log_axis, note
from qgate.summaries.reading import worst
from qgate.text import brief

_OF = {
    ("input", "token"): "largest |x| of a token, over its channels",
    ("input", "channel"): "largest |x| of a channel, over the tokens",
    ("input", "all"): "|x|, of all values",
    ("weight", "channel"): "largest |w| of an input channel, over the outputs",
    ("weight", "all"): "|w|, of all values",
}
# Curves: name, color, marker, and the figure that they are of.
_TOP = (
    ("top-1", ORANGE, "o", ("top", 0)),
    ("top-2", YELLOW, "s", ("top", 1)),
    ("top-3", PINK, "^", ("top", 2)),
    ("median", BLUE, "D", ("median", 0)),
    ("min", GREEN, "v", ("low", 0)),
)
_OUTPUT = (
    ("max", ORANGE, "o", ("top", 0)),
    ("median", BLUE, "D", ("median", 0)),
    ("min-3", SKY, "s", ("low", 2)),
    ("min-2", PURPLE, "^", ("low", 1)),
    ("min-1", GREEN, "v", ("low", 0)),
)


def _figure(layer: LayerActivations, reduced: str, of: tuple[str, int]) -> float:
    magnitude = layer["magnitude"][reduced]
    if of[0] == "median":
        return magnitude["median"]
    values = magnitude["top" if of[0] == "top" else "low"]
    return values[of[1]] if of[1] < len(values) else math.nan


def draw_magnitudes(
    record: ActivationsRecord, role: str, patterns: list[str], view: ViewSettings
) -> Sheet | None:
    """Draw the panels of some patterns in one role; a weight is reduced to its input channels."""
    reduced = view.magnitude.reduced
    reduced = "channel" if role == "weight" and reduced != "all" else reduced
    layers: Layers = []
    for pattern in patterns:
        panel = in_panel(record, f"magnitude_{role}", pattern, role)
        layers += [layer for layer in panel if layer not in layers]
    layers = [layer for layer in layers if reduced in layer.get("magnitude", {})]
    if not layers:
        return None
    curves = _OUTPUT if role == "output" else _TOP
    groups, more = groups_of(layers)
    page, all_axes = group_sheet(groups, _title(layers, role, reduced))
    for axes, group in zip(all_axes, groups, strict=True):
        style = "-" if not group.names and len(group.layers) > 1 else ""
        for _, color, marker, of in curves:
            values = [_figure(layer, reduced, of) for layer in group.layers]
            axes.plot(
                group.ticks, [value if value > 0 else math.nan for value in values], style,
                color=color, marker=marker, markersize=4.5 if len(values) <= 40 else 2.5,
                linewidth=1.2, markeredgecolor=WHITE, markeredgewidth=0.3,
            )  # fmt: skip
    every = [_figure(layer, reduced, of) for layer in layers for *_, of in curves]
    positive = [value for value in every if value > 0 and math.isfinite(value)]
    logarithmic = bool(positive) and max(positive) > 20 * min(positive)
    for axes in all_axes if logarithmic else ():
        axes.set_yscale("log")
    shared_limits(all_axes)
    for axes in all_axes:
        if logarithmic:
            log_axis(axes, "y")
        else:
            axes.set_ylim(bottom=0)
    label = _OF["weight" if role == "weight" else "input", reduced]
    y_label(page, all_axes, label if role == "weight" else f"{label} (mean of samples)")
    if more:
        note(all_axes[-1], more)
    near = rounding_note(layers) if reduced == "all" else ""
    entries = {
        f"{name} ({near})" if near and name == "median" else name: line(color, marker)
        for name, color, marker, _ in curves
    }
    return key(page, entries, view.show_legend)


def _title(layers: Layers, role: str, reduced: str) -> str:
    peaks = worst(layers, lambda each: _figure(each, reduced, ("top", 0)))
    if not peaks:
        return f"No {role} has a magnitude"
    top, value = peaks[0]
    median = _figure(top, reduced, ("median", 0))
    unit = "value" if reduced == "all" else reduced
    past = f", {brief(value / median)} times its median {unit}" if median > 0 else ""
    return f"The {role} of {name_of(top, 60)} reaches {brief(value)}{past}"
