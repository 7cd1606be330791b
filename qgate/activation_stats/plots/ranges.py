"""Percentiles of every channel: which channels a scale has to fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from qgate.activation_stats.plots._sheet import key, panel_sheet
from qgate.activation_stats.reading import Layers, in_panel, name_of
from qgate.activation_stats.record import ActivationsRecord, LayerActivations
from qgate.activation_stats.settings import ViewSettings
from qgate.charts.figure import PANEL, dress
from qgate.charts.palette import BLACK, ORANGE, PINK, SKY, YELLOW
from qgate.charts.sheet import Sheet, line, patch, plain, sheet, whole_numbers
from qgate.text import brief

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Pairs of percentiles that belong together, from the outside in, dark inside.
_FILLS = {
    "min to max": ("0", "100", "#cfe3f1"),
    "0.01 % to 99.99 %": ("0.01", "99.99", "#93c4df"),
    "1 % to 99 %": ("1", "99", "#4292c6"),
    "25 % to 75 %": ("25", "75", "#08519c"),
}
_LINES = {
    "0": ORANGE, "0.01": YELLOW, "1": PINK, "25": SKY, "50": BLACK, "75": SKY, "99": PINK,
    "99.99": YELLOW, "100": ORANGE,
}  # fmt: skip
_PAIRS = {
    "min and max": "0",
    "0.01 and 99.99 %": "0.01",
    "1 and 99 %": "1",
    "25 and 75 %": "25",
    "median": "50",
}


def range_layers(record: ActivationsRecord, pattern: str, view: ViewSettings) -> Layers:
    role = "input" if view.percentile_range.is_input else "output"
    layers = in_panel(record, "percentile_range", pattern, role)
    return [layer for layer in layers if "ranges" in layer]


def draw_range(layer: LayerActivations, view: ViewSettings) -> Sheet | None:
    """Draw one layer."""
    values = layer["ranges"]["percentiles"]
    if not values or not len(next(iter(values.values()))):
        return None
    page = sheet(12, 4.6, _title(layer, view))
    _draw(page.figure.subplots(), layer, view)
    return _with_key(page, values, view)


def draw_ranges(record: ActivationsRecord, pattern: str, view: ViewSettings) -> Sheet | None:
    """Draw several layers of a panel side by side, with one scale."""
    layers = range_layers(record, pattern, view)
    if not layers:
        return None
    title = _title(max(layers, key=lambda entry: _widest(entry)[1]), view)
    widths = (10.0, 13.0, 14.0)
    page, all_axes = panel_sheet(len(layers), title, widths=widths, base=1.4, row_height=2.7)
    for axes, entry in zip(all_axes, layers, strict=True):
        _draw(axes, entry, view)
        axes.set_title(plain(name_of(entry, 46), 46), fontsize=PANEL, loc="left", y=1.0)
    return _with_key(page, {p for entry in layers for p in entry["ranges"]["percentiles"]}, view)


def _widest(layer: LayerActivations) -> tuple[int, float, float]:
    """Return the widest channel, how wide it is, and that over the median channel."""
    values = layer["ranges"]["percentiles"]
    ends = [np.abs(np.asarray(values[name])) for name in ("0", "100") if name in values]
    sizes = np.maximum.reduce(ends) if ends else np.zeros(1)
    if not len(sizes):
        return 0, 0.0, 0.0
    channel, median = int(sizes.argmax()), float(np.median(sizes))
    return channel, float(sizes[channel]), float(sizes[channel]) / median if median > 0 else 0.0


def _title(layer: LayerActivations, view: ViewSettings) -> str:
    channel, size, ratio = _widest(layer)
    value = "|x|" if view.percentile_range.use_abs else "x"
    past = f", {brief(ratio)} times the median channel" if ratio else ""
    return (
        f"Channel {channel} of the {layer['role']} of {name_of(layer, 60)} is the widest: {value} "
        f"to {brief(size)}{past}"
    )


def _draw(axes: Axes, layer: LayerActivations, view: ViewSettings) -> None:
    values = {p: np.asarray(ends) for p, ends in layer["ranges"]["percentiles"].items()}
    channels = np.arange(len(next(iter(values.values()))))
    if view.percentile_range.style == "fill":
        # Steps, because a band between single channels is too thin to be seen.
        for low, high, color in _FILLS.values():
            if low in values and high in values:
                axes.fill_between(
                    channels, values[low], values[high], color=color, linewidth=0.4, step="mid"
                )
    for name, color in _LINES.items():
        if name in values and (view.percentile_range.style != "fill" or name == "50"):
            axes.plot(channels, values[name], color=color, linewidth=0.8)
    axes.margins(x=0.01)
    value = "|value|" if view.percentile_range.use_abs else "value"
    dress(axes, x="channel", y=f"{value}, percentiles ±{100 * layer['ranges']['error']:.1f} %")
    whole_numbers(axes)


def _with_key(page: Sheet, percentiles: Iterable[str], view: ViewSettings) -> Sheet:
    if view.percentile_range.style == "fill":
        fills = {name: patch(color) for name, (*_, color) in _FILLS.items()}
        return key(page, {**fills, "median": line(BLACK)}, view.show_legend)
    pairs = {name: p for name, p in _PAIRS.items() if p in percentiles}
    return key(page, {name: line(_LINES[p]) for name, p in pairs.items()}, view.show_legend)
