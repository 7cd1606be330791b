"""Tokens by channels of one sample, as a surface and as a flat map, which is easier to read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from qgate.activation_stats.reading import Layers, in_panel, name_of
from qgate.activation_stats.record import ActivationsRecord, LayerActivations
from qgate.activation_stats.settings import ViewSettings
from qgate.charts.figure import LABEL, PANEL, SMALL, dress
from qgate.charts.palette import BLACK, MAP, WARN
from qgate.charts.shapes import cell_map
from qgate.charts.sheet import Sheet, color_bar, plain, sheet, whole_numbers
from qgate.summaries.reading import figure_of
from qgate.text import brief

LIMIT = 64.0
"""A largest value above so many 99th percentiles is marked, as quant-smooth-ana does."""
_STATS = {
    "mean": "mean",
    "std": "std",
    "min": "min",
    "max": "max",
    "p99": "p99",
    "beyond_3_std": "> mean + 3 std",
    "max_over_p99": "Max/P99",
}


def map_layers(record: ActivationsRecord, view: ViewSettings) -> Layers:
    """Return the layers that have a heat map, in the order of the model."""
    role = "input" if view.heatmap_3d.is_input else "output"
    patterns = record["panels"].get("heat_map", {})
    layers = [layer for p in patterns for layer in in_panel(record, "heat_map", p, role)]
    return [layer for layer in layers if "heat_map" in layer and any(layer["heat_map"]["cells"])]


def _cells(layer: LayerActivations) -> npt.NDArray[np.float64]:
    return np.asarray(layer["heat_map"]["cells"], dtype=np.float64)


def _title(layer: LayerActivations) -> str:
    """Name the largest cell, where it is, and how far it stands out."""
    heat, cells = layer["heat_map"], _cells(layer)
    places = []
    at = np.unravel_index(int(cells.argmax()), cells.shape)
    for dimension, cell, many in zip(("token", "channel"), map(int, at), cells.shape, strict=True):
        of = heat["tokens"] if dimension == "token" else heat["channels"]
        low, high = cell * of // many, (cell + 1) * of // many - 1
        places.append(f"{dimension} {low}" if low >= high else f"{dimension}s {low} to {high}")
    text = f"The {layer['role']} of {name_of(layer, 60)} reaches {brief(float(cells.max()))} at "
    text += ", ".join(places)
    ratio = figure_of(heat["stats"], "max_over_p99")
    return f"{text}: {brief(ratio)} times its 99th percentile" if ratio > 0 else text


def draw_surface(layer: LayerActivations, view: ViewSettings) -> Sheet | None:
    """Draw cells that are the largest of what they cover, so that no peak is lost."""
    heat, cells = layer["heat_map"], _cells(layer)
    if min(cells.shape) < 2:
        return None
    page = sheet(10, 7.4, _title(layer))
    axes: Any = page.figure.add_subplot(projection="3d")
    x = np.linspace(0, heat["channels"] - 1, cells.shape[1])
    y = np.linspace(0, heat["tokens"] - 1, cells.shape[0])
    axes.plot_surface(
        *np.meshgrid(x, y), cells, rstride=1, cstride=1, cmap=MAP, linewidth=0, antialiased=False
    )
    height, turn = view.heatmap_3d.view_angle
    axes.view_init(elev=height, azim=turn)
    axes.set_box_aspect((1.5, 1.2, 0.8), zoom=0.92)
    axes.set_xlabel("channel", fontsize=LABEL, labelpad=8)
    axes.set_ylabel("token", fontsize=LABEL, labelpad=8)
    axes.set_zlabel("|x|", fontsize=LABEL, labelpad=6)
    axes.tick_params(labelsize=SMALL)
    return page


def draw_flat(layer: LayerActivations, view: ViewSettings) -> Sheet | None:  # noqa: ARG001
    """Draw the same from above, with the figures of all values beside it."""
    heat, cells = layer["heat_map"], _cells(layer)
    page = sheet(12, 5.4, _title(layer))
    axes, text = page.figure.subplots(1, 2, width_ratios=[5, 1])
    extent = (-0.5, heat["channels"] - 0.5, heat["tokens"] - 0.5, -0.5)
    image = cell_map(axes, cells, origin="upper", extent=extent)
    pooled = cells.shape != (heat["tokens"], heat["channels"])
    about = f"sample {heat['sample']}, {heat['tokens']} tokens × {heat['channels']} channels"
    about += "; a cell is the largest of what it covers" if pooled else ""
    dress(axes, title=plain(about, 100), x="channel", y="token", grid="")
    whole_numbers(axes)
    whole_numbers(axes, "y")
    color_bar(page, image, axes, "|x|")
    text.axis("off")
    rows = [(name, figure_of(heat["stats"], key)) for key, name in _STATS.items()]
    for at, (name, value) in enumerate(row for row in rows if row[1] == row[1]):
        bad = name == "Max/P99" and value > LIMIT
        for x, words, side in ((0.0, name, "left"), (1.0, brief(value), "right")):
            text.text(
                x, 0.95 - 0.08 * at, words, fontsize=PANEL, color=WARN if bad else BLACK,
                weight="bold" if bad else "normal", va="top", ha=side,
            )  # fmt: skip
    return page
