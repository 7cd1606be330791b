"""Tokens by channels of one sample: as a surface, and flat, which is easier to read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from qgate.activation_stats.reading import Layers, Look, in_panel, name_of
from qgate.activation_stats.record import ActivationsRecord, LayerActivations
from qgate.charts.figure import LABEL, PANEL, SMALL, dress
from qgate.charts.palette import BLACK, MAP, WARN
from qgate.charts.sheet import Sheet, color_bar, plain, sheet, whole_numbers
from qgate.summaries.reading import figure_of
from qgate.text import brief

LIMIT = 64.0
"""A largest value above so many 99th percentiles is marked, as in the known tool."""


def map_layers(record: ActivationsRecord, look: Look) -> Layers:
    """In the order of the model, each once."""
    role = "input" if look.heat_input else "output"
    found = [
        each
        for pattern in record["panels"].get("heat_map", {})
        for each in in_panel(record, "heat_map", pattern, role)
    ]
    return [each for each in found if "heat_map" in each and any(each["heat_map"]["cells"])]


def _cells(layer: LayerActivations) -> npt.NDArray[np.float64]:
    return np.asarray(layer["heat_map"]["cells"], dtype=np.float64)


def _title(layer: LayerActivations) -> str:
    """The largest cell, where it is, and how far it stands out."""
    told, cells = layer["heat_map"], _cells(layer)
    row, column = np.unravel_index(int(cells.argmax()), cells.shape)
    tokens, channels = told["tokens"], told["channels"]
    text = (
        f"The {layer['role']} of {name_of(layer, 60)} reaches {brief(float(cells.max()))} at "
        f"{_place('token', int(row), tokens, cells.shape[0])}, "
        f"{_place('channel', int(column), channels, cells.shape[1])}"
    )
    ratio = figure_of(told["stats"], "max_over_p99")
    return f"{text}: {brief(ratio)} times its 99th percentile" if ratio > 0 else text


def _place(what: str, cell: int, of: int, cells: int) -> str:
    low, high = cell * of // cells, (cell + 1) * of // cells - 1
    return f"{what} {low}" if low >= high else f"{what}s {low} to {high}"


def draw_surface(layer: LayerActivations, look: Look) -> Sheet | None:
    """Cells are the largest of what they cover, so that no peak is lost."""
    told, cells = layer["heat_map"], _cells(layer)
    if min(cells.shape) < 2:
        return None
    made = sheet(10, 7.4, _title(layer))
    axes: Any = made.figure.add_subplot(projection="3d")
    x = np.linspace(0, told["channels"] - 1, cells.shape[1])
    y = np.linspace(0, told["tokens"] - 1, cells.shape[0])
    grid_x, grid_y = np.meshgrid(x, y)
    axes.plot_surface(
        grid_x, grid_y, cells, rstride=1, cstride=1, cmap=MAP, linewidth=0, antialiased=False
    )
    height, turn = look.view_angle
    axes.view_init(elev=height, azim=turn)
    axes.set_box_aspect((1.5, 1.2, 0.8), zoom=0.92)
    axes.set_xlabel("channel", fontsize=LABEL, labelpad=8)
    axes.set_ylabel("token", fontsize=LABEL, labelpad=8)
    axes.set_zlabel("|x|", fontsize=LABEL, labelpad=6)
    axes.tick_params(labelsize=SMALL)
    return made


def draw_flat(layer: LayerActivations, look: Look) -> Sheet | None:  # noqa: ARG001
    """The same from above, with the figures of all values beside it."""
    told, cells = layer["heat_map"], _cells(layer)
    made = sheet(12, 5.4, _title(layer))
    axes, text = made.figure.subplots(1, 2, width_ratios=[5, 1])
    image = axes.imshow(
        cells, aspect="auto", interpolation="nearest", cmap=MAP, origin="upper",
        extent=(-0.5, told["channels"] - 0.5, told["tokens"] - 0.5, -0.5),
    )  # fmt: skip
    pooled = cells.shape != (told["tokens"], told["channels"])
    about = f"sample {told['sample']}, {told['tokens']} tokens × {told['channels']} channels"
    about += "; a cell is the largest of what it covers" if pooled else ""
    dress(axes, title=plain(about, 100), x="channel", y="token", grid="")
    whole_numbers(axes)
    whole_numbers(axes, "y")
    color_bar(made, image, axes, "|x|")
    text.axis("off")
    rows = [(name, figure_of(told["stats"], key)) for key, name in _STATS.items()]
    shown = [(name, value) for name, value in rows if value == value]
    for at, (name, value) in enumerate(shown):
        bad = name == "Max/P99" and value > LIMIT
        color = WARN if bad else BLACK
        weight = "bold" if bad else "normal"
        height = 0.95 - 0.08 * at
        text.text(0.0, height, name, fontsize=PANEL, color=color, weight=weight, va="top")
        text.text(1.0, height, brief(value), fontsize=PANEL, color=color, weight=weight, va="top",
                  ha="right")  # fmt: skip
    return made


_STATS = {
    "mean": "mean",
    "std": "std",
    "min": "min",
    "max": "max",
    "p99": "p99",
    "beyond_3_std": "> mean + 3 std",
    "max_over_p99": "Max/P99",
}
