"""Percentiles of every channel: which channels a scale has to fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from qgate.activation_stats.plots._sheet import key
from qgate.activation_stats.reading import Layers, Look, in_panel, name_of
from qgate.activation_stats.record import ActivationsRecord, LayerActivations
from qgate.charts.figure import PANEL, dress
from qgate.charts.palette import BLACK, ORANGE, PINK, SKY, YELLOW
from qgate.charts.sheet import Sheet, columns_for, line, panels, patch, plain, sheet, whole_numbers
from qgate.text import brief

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

# Pairs of percentiles that belong together, from the outside in, dark inside.
_PAIRS = (("0", "100"), ("0.01", "99.99"), ("1", "99"), ("25", "75"))
_FILLS = ("#cfe3f1", "#93c4df", "#4292c6", "#08519c")
_LINES = {
    "0": (ORANGE, "min"), "0.01": (YELLOW, "0.01 %"), "1": (PINK, "1 %"),
    "25": (SKY, "25 %"), "50": (BLACK, "median"), "75": (SKY, "75 %"),
    "99": (PINK, "99 %"), "99.99": (YELLOW, "99.99 %"), "100": (ORANGE, "max"),
}  # fmt: skip


def range_layers(record: ActivationsRecord, pattern: str, look: Look) -> Layers:
    role = "input" if look.percentile_input else "output"
    return [
        each for each in in_panel(record, "percentile_range", pattern, role) if "ranges" in each
    ]


def draw_range(layer: LayerActivations, look: Look) -> Sheet | None:
    """One layer."""
    values = layer["ranges"]["percentiles"]
    if not values or not len(next(iter(values.values()))):
        return None
    made = sheet(12, 4.6, _finding(layer, look))
    axes = made.figure.subplots()
    _draw(axes, layer, look)
    key(made, _entries(values, look), look.show_legend)
    return made


def draw_ranges(record: ActivationsRecord, pattern: str, look: Look) -> Sheet | None:
    """Several layers of a panel side by side, with one scale."""
    layers = range_layers(record, pattern, look)
    if not layers:
        return None
    worst = max(layers, key=lambda each: _spread(each)[1])
    columns = columns_for(len(layers))
    rows = -(-len(layers) // columns)
    made = sheet({1: 10.0, 2: 13.0}.get(columns, 14.0), 1.4 + 2.7 * rows, _finding(worst, look))
    drawn = panels(made, len(layers), columns)
    for axes, each in zip(drawn, layers, strict=True):
        _draw(axes, each, look)
        axes.set_title(plain(name_of(each, 46), 46), fontsize=PANEL, loc="left", y=1.0)
    told = (name for each in layers for name in each["ranges"]["percentiles"])
    names: dict[str, object] = dict.fromkeys(told)
    key(made, _entries(names, look), look.show_legend)
    return made


def _spread(layer: LayerActivations) -> tuple[int, float, float]:
    """The widest channel, how wide it is, and that over the median channel."""
    told = layer["ranges"]["percentiles"]
    ends = [np.abs(np.asarray(told[name])) for name in ("0", "100") if name in told]
    sizes = np.maximum.reduce(ends) if ends else np.zeros(1)
    channel = int(sizes.argmax()) if len(sizes) else 0
    median = float(np.median(sizes)) if len(sizes) else 0.0
    size = float(sizes[channel]) if len(sizes) else 0.0
    return channel, size, size / median if median > 0 else 0.0


def _finding(layer: LayerActivations, look: Look) -> str:
    channel, size, ratio = _spread(layer)
    what = "|x|" if look.use_abs else "x"
    past = f", {brief(ratio)} times the median channel" if ratio else ""
    return (
        f"Channel {channel} of the {layer['role']} of {name_of(layer, 60)} is the widest: {what} "
        f"to {brief(size)}{past}"
    )


def _draw(axes: Axes, layer: LayerActivations, look: Look) -> None:
    told = {name: np.asarray(each) for name, each in layer["ranges"]["percentiles"].items()}
    channels = np.arange(len(next(iter(told.values()))))
    if look.style == "fill":
        # Steps, because a band between single channels is too thin to be seen.
        for (low, high), color in zip(_PAIRS, _FILLS, strict=True):
            if low in told and high in told:
                axes.fill_between(
                    channels, told[low], told[high], color=color, linewidth=0.4, step="mid"
                )
        if "50" in told:
            axes.plot(channels, told["50"], color=BLACK, linewidth=0.8)
    else:
        for name, (color, _) in _LINES.items():
            if name in told:
                axes.plot(channels, told[name], color=color, linewidth=0.8)
    axes.margins(x=0.01)
    what = "|value|" if look.use_abs else "value"
    dress(axes, x="channel", y=f"{what}, percentiles ±{100 * layer['ranges']['error']:.1f} %")
    whole_numbers(axes)


def _entries(values: Mapping[str, object], look: Look) -> dict[str, Artist]:
    if look.style == "fill":
        names = [f"{low} % to {high} %" for low, high in _PAIRS]
        names[0] = "min to max"
        told: dict[str, Artist] = {n: patch(c) for n, c in zip(names, _FILLS, strict=True)}
        return {**told, "median": line(BLACK)}
    pairs = {"min and max": "0", "0.01 and 99.99 %": "0.01", "1 and 99 %": "1",
             "25 and 75 %": "25", "median": "50"}  # fmt: skip
    return {name: line(_LINES[p][0]) for name, p in pairs.items() if p in values}
