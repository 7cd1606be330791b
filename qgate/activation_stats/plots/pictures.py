"""All pictures of activations in the order of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qgate.activation_stats.plots.distributions import draw_boxes, draw_histograms
from qgate.activation_stats.plots.formats import (
    draw_alphas,
    draw_losses,
    draw_proposal,
    draw_sensitivity,
    draw_smoothing,
)
from qgate.activation_stats.plots.heatmaps import draw_flat, draw_surface, map_layers
from qgate.activation_stats.plots.magnitudes import draw_magnitudes
from qgate.activation_stats.plots.outliers import (
    draw_outlier_channels,
    draw_outlier_counts,
    draw_outlier_positions,
    draw_outlier_tokens,
)
from qgate.activation_stats.plots.ranges import draw_range, draw_ranges, range_layers
from qgate.activation_stats.reading import clean, numbers, stems
from qgate.activation_stats.record import ActivationsRecord
from qgate.activation_stats.settings import ViewSettings
from qgate.charts.figure import render_image, save
from qgate.charts.sheet import Sheet

_COUNT = "Outlier tokens of each layer, by quant-smooth-ana's rule."
_CHANNEL = "Channels that stand out, and single massive activations."


@dataclass(frozen=True)
class ActivationPicture:
    """A picture of a report; `name` is its file without the model's name and the ending."""

    section: str
    name: str
    about: str
    build: Callable[[], Sheet | None]

    def sheet(self) -> Sheet | None:
        with np.errstate(all="ignore"):
            return self.build()

    def write(self, sheet: Sheet, paths: list[Path], *, dpi: int) -> None:
        """Write the files of a drawn picture."""
        image = None
        for path in paths:
            if path.suffix == ".png" and image is None:
                image = render_image(sheet.figure, dpi)
            save(sheet.figure, path, dpi=dpi, image=image)


def pictures(record: ActivationsRecord, view: ViewSettings) -> list[ActivationPicture]:
    """Return the pictures of a record, whose names are all different."""
    all_pictures = [
        ActivationPicture(section, name, about, partial(draw, *arguments, view))
        for section, name, about, draw, *arguments in _all(record, view)
    ]
    twice = [
        n
        for n, count in Counter(picture.name.lower() for picture in all_pictures).items()
        if count > 1
    ]
    if twice:
        raise AssertionError(f"pictures of one name: {', '.join(twice)}")
    return all_pictures


def _all(record: ActivationsRecord, view: ViewSettings) -> Iterator[tuple[Any, ...]]:
    """Yield section, name, description, function that draws, and its arguments."""
    panels = record["panels"]
    names = stems(dict.fromkeys(pattern for kind in panels.values() for pattern in kind))
    if panels.get("outliers"):
        for enabled, kind, about, draw in (
            (view.enabled.outlier_layer_wise, "count", _COUNT, draw_outlier_counts),
            (
                view.enabled.outlier_position,
                "position",
                "Where in the sequence they are.",
                draw_outlier_positions,
            ),
            (view.enabled.outlier_token, "token", "Which tokens they are.", draw_outlier_tokens),
            (True, "channel", _CHANNEL, draw_outlier_channels),
        ):
            if enabled:
                yield "outliers", f"outlier-{kind}", about, draw, record
    for role in ("input", "output", "weight"):
        about = f"SQNR of the {role} in each format, the worse of with and without massive "
        yield "formats", f"sqnr-{role}", f"{about}elements.", draw_losses, record, role
    for fmt in dict.fromkeys(entry["format"] for entry in record["sensitivity"]):
        about, name = f"Each layer quantized alone in {fmt}.", f"sensitivity-{clean(fmt)}"
        yield "sensitivity", name, about, draw_sensitivity, record, fmt
        yield "sensitivity", f"{name}-proposal", about, draw_proposal, record, fmt
    if any("smoothing" in entry for entry in record["layers"]):
        about = "Difficulty moved from activations to weights; what it is predicted to gain."
        yield "smoothing", "smoothing-alpha", about, draw_alphas, record
        yield "smoothing", "smoothing-gain", about, draw_smoothing, record
    for role, ending in (
        ("input", "_input-input"),
        ("output", "_output-output"),
        ("weight", "-weight"),
    ):
        patterns = list(panels.get(f"magnitude_{role}", {}))
        combined = {"combined": patterns} if view.magnitude.combined_plot and patterns else {}
        for name, own in (combined or {names[p]: [p] for p in patterns}).items():
            about = f"Magnitudes of each layer's {role}; {', '.join(own)}"
            yield "magnitude", f"{name}{ending}", about, draw_magnitudes, record, role, own
    for p in panels.get("distribution", {}):
        if "boxplot" in view.distribution.plot_types:
            yield "distribution", f"{names[p]}-distribution", p, draw_boxes, record, p
        if "histogram" in view.distribution.plot_types:
            yield "distribution", f"{names[p]}-histogram", p, draw_histograms, record, p
    role = "input" if view.percentile_range.is_input else "output"
    for p in panels.get("percentile_range", {}):
        layers, ending = range_layers(record, p, view), f"{names[p]}-{role}-percentile"
        modules = stems(entry["module"] for entry in layers)
        # Numbers of layers; names, where numbers do not tell them apart.
        for layer, label in zip(layers, numbers(layers) or modules.values(), strict=True):
            name = f"{label}-{ending}{'-line' if view.percentile_range.style == 'line' else ''}"
            yield "percentiles", name, layer["module"], draw_range, layer
        yield "percentiles", f"{ending}-multi", p, draw_ranges, record, p
    for index, layer in enumerate(map_layers(record, view)):
        about = layer["module"]
        if index == 0:
            yield "heatmap", "heatmap-heatmap-3d", about, draw_surface, layer
        if index < view.heatmap_3d.num_2d_layers:
            yield "heatmap", f"heatmap-heatmap-2d-layer{index}", about, draw_flat, layer
